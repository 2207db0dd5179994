//! The training loop, which is the same on one process and on many.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::time::Duration;

use candle_core::Tensor;
use dist_candle::{Tensors, loss_and_gradient};
use dist_collectives::Communicator;
use dist_parallel::compress::Compression;
use dist_parallel::optim::{AdamW, AdamWOptions, Optimizer};
use dist_parallel::step::StepReport;
use dist_parallel::trainer::Trainer;
use dist_parallel::{BoxError, Params, Sequence, Values};

use crate::DemoError;
use crate::checkpoint::{self, Saver};
use crate::curves::{self, Curve};
use crate::model;
use crate::options::Options;
use crate::random::Random;
use crate::report::{Progress, Reporter};
use crate::sample;
use crate::text::Text;
use crate::trace::{self, Trace};

/// Trains on all ranks of the communicator. Rank 0 reports, writes the pictures and shows a sample.
pub(crate) fn train(options: &Options, text: &Text, mut comm: Communicator) -> Result<(), DemoError> {
    agree(&mut comm, options, text)?;
    let mut curves = Vec::new();
    for compression in options.trainings() {
        let (ended, trained) = train_once(options, text, comm, compression)?;
        comm = ended;
        let Trained { curve, mut model, timeline, reporter, params_crc32 } = trained;
        curves.push(curve);
        if comm.rank() == 0 {
            draw(options, text, &curves, &timeline)?;
            show_sample(options, text, &mut model, &reporter)?;
            reporter.end(params_crc32, compression)?;
        }
    }
    Ok(())
}

/// The result of one training.
struct Trained {
    curve: Curve,
    model: Sequence<Tensor>,
    /// A picture of the latest step on every rank.
    timeline: String,
    reporter: Reporter,
    params_crc32: u32,
}

/// Trains from the start to the end.
fn train_once(
    options: &Options,
    text: &Text,
    comm: Communicator,
    compression: Option<Compression>,
) -> Result<(Communicator, Trained), DemoError> {
    let ranks = comm.world_size();
    let mut reporter = Reporter::new(comm.rank(), options.steps, options.json);
    let model = model::transformer(options.shape(), options.seed).map_err(DemoError::Model)?;
    let parameters: usize = model.infos().iter().map(dist_parallel::ParamInfo::len).sum();
    reporter.say(&format!(
        "{ranks} {}, {parameters} parameters, {} files with {} bytes, whose entropy is {:.3} nats per byte",
        if ranks == 1 { "process" } else { "processes" },
        text.files(),
        text.bytes().len(),
        text.byte_entropy(),
    ))?;
    let trainer = options.trainer(ranks, compression).build(comm, model, Tensors)?;
    let curve = Curve { compression, done: 0, losses: Vec::new(), bytes_sent: 0 };
    let mut session = Session { options, text, trainer, curve, trace: Trace::default() };
    session.run(&reporter)?;
    reporter.end_steps();
    let Session { mut trainer, curve, trace, .. } = session;
    if let Some(said) = curve.bytes_per_step() {
        reporter.say(&said)?;
    }
    let staged = trainer.pipeline_mut().map(trace::pipeline).transpose()?;
    let mut model = model::transformer(options.shape(), options.seed).map_err(DemoError::Model)?;
    trainer.copy_parameters(&mut model)?;
    let (mut comm, _) = trainer.into_parts()?;
    let params_crc32 = params_crc32(&mut comm, &model)?;
    let parts_max = 2 * options.micro_batches.div_ceil(ranks) + 2;
    let bars = trace::gather(&mut comm, &trace, parts_max)?;
    let title = format!("Step {} on {ranks} ranks", curve.done + curve.losses.len());
    let timeline = staged.unwrap_or_else(|| trace::timeline(&title, bars));
    Ok((comm, Trained { curve, model, timeline, reporter, params_crc32 }))
}

struct Session<'a> {
    options: &'a Options,
    text: &'a Text,
    trainer: Box<dyn Trainer<Tensor>>,
    curve: Curve,
    /// The timeline of the latest step.
    trace: Trace,
}

impl Session<'_> {
    fn run(&mut self, reporter: &Reporter) -> Result<(), DemoError> {
        let options = self.options;
        let adamw = AdamWOptions { beta2: 0.95, ..AdamWOptions::default() };
        let mut optimizer = AdamW::new(adamw)?;
        if let Some(directory) = &options.load {
            self.load(directory, &mut optimizer, reporter)?;
        }
        let (schedule, mut saver) = (options.schedule(), Saver::new(options));
        let runtime = self.trainer.communicator().runtime().clone();
        let tokens = (options.micro_batches * options.samples * options.context) as f64;
        let (mut elapsed, mut exposed) = (Duration::ZERO, Duration::ZERO);
        for step in self.curve.done + 1..=options.steps {
            if step == options.steps {
                // The traces of all ranks must begin at the same time.
                self.trainer.communicator_mut().barrier()?;
            }
            optimizer.set_learning_rate(schedule(step as u64))?;
            let started = runtime.now();
            let report = self.step(step, &mut optimizer)?;
            let took = runtime.now().saturating_sub(started);
            elapsed += took;
            exposed += report.exposed;
            self.curve.losses.push(report.loss);
            self.curve.bytes_sent += report.bytes_sent;
            reporter.step(&Progress {
                step,
                steps: options.steps,
                report,
                compression: self.curve.compression,
                tokens_per_s: tokens / took.as_secs_f64(),
                waiting: exposed.as_secs_f64() / elapsed.as_secs_f64(),
            })?;
            if let Some(saver) = &mut saver {
                saver.after_step(step, &mut *self.trainer, &optimizer)?;
            }
        }
        Ok(saver.map_or(Ok(()), |mut saver| saver.wait())?)
    }

    fn load(&mut self, from: &Path, optimizer: &mut AdamW, reporter: &Reporter) -> Result<(), DemoError> {
        match checkpoint::load(from, &mut *self.trainer, optimizer)? {
            Some(step) => {
                self.curve.done = usize::try_from(step).unwrap_or(usize::MAX);
                reporter.say(&format!("going on after step {step}, which {} has", from.display()))?;
            }
            None => reporter.say(&format!("{} has no checkpoint: training begins", from.display()))?,
        }
        Ok(())
    }

    fn step(&mut self, step: usize, optimizer: &mut AdamW) -> Result<StepReport, DemoError> {
        let Self { options, text, trainer, .. } = self;
        let runtime = trainer.communicator().runtime().clone();
        let trace = RefCell::new(Trace::default());
        let report = trainer.step(options.micro_batches, |index| {
            trace.borrow_mut().begin(trace::FORWARD, runtime.now());
            let (input, next) = batch(options, text, step, index)?;
            let (trace, runtime) = (&trace, &runtime);
            Ok((input, move |logits: Tensor| {
                let result = loss_and_gradient(&logits, |logits| model::loss(logits, &next))?;
                trace.borrow_mut().begin(trace::BACKWARD, runtime.now());
                Ok(result)
            }))
        })?;
        let mut trace = trace.into_inner();
        trace.begin(trace::WAITING, runtime.now().saturating_sub(report.exposed));
        trace.begin(trace::OPTIMIZER, runtime.now());
        trainer.update(optimizer)?;
        trace.end(runtime.now());
        self.trace = trace;
        Ok(report)
    }
}

/// Returns a checksum of all parameters, which is the same on every rank.
fn params_crc32(comm: &mut Communicator, model: &Sequence<Tensor>) -> Result<u32, DemoError> {
    let mut hasher = crc32fast::Hasher::new();
    for index in 0..model.infos().len() {
        model.read(index, &mut |values| hasher.update(bytes(values))).map_err(DemoError::Model)?;
    }
    let own = hasher.finalize();
    same_on_all(comm, own, "parameters")?;
    Ok(own)
}

fn draw(options: &Options, text: &Text, curves: &[Curve], timeline: &str) -> Result<(), DemoError> {
    let out = &options.out;
    let failed = |source| DemoError::Picture { path: out.clone(), source };
    fs::create_dir_all(out).map_err(failed)?;
    let losses = curves::chart(curves, text.byte_entropy());
    for (name, picture) in [("loss.svg", losses.as_str()), ("timeline.svg", timeline)] {
        let path = out.join(name);
        fs::write(&path, picture).map_err(|source| DemoError::Picture { path, source })?;
    }
    Ok(())
}

fn show_sample(
    options: &Options,
    text: &Text,
    model: &mut Sequence<Tensor>,
    reporter: &Reporter,
) -> Result<(), DemoError> {
    if !reporter.has_readers() {
        return Ok(());
    }
    let Options { context, seed, out, .. } = options;
    let prompt = text.sample((*context).min(PROMPT_LEN), &mut Random::named(*seed, "prompt"));
    let continuation = sample::continuation(model, *context, prompt, SAMPLE_LEN, *seed);
    let continuation = continuation.map_err(DemoError::Model)?;
    let (prompt, continuation) = (String::from_utf8_lossy(prompt), String::from_utf8_lossy(&continuation));
    reporter.say(&format!("a sample, after {prompt:?}:\n{continuation}"))?;
    let path = |name: &str| Path::new(out).join(name).display().to_string();
    reporter.say(&format!("pictures: {}, {}", path("loss.svg"), path("timeline.svg")))?;
    Ok(())
}

/// Returns the samples of a micro-batch and their next bytes. They do not depend on the rank.
fn batch(options: &Options, text: &Text, step: usize, index: usize) -> Result<(Tensor, Tensor), BoxError> {
    let mut random = Random::keyed([options.seed, step as u64, index as u64]);
    let samples: Vec<&[u8]> =
        (0..options.samples).map(|_| text.sample(options.sample_len(), &mut random)).collect();
    let input = model::rows(samples.iter().map(|sample| &sample[..options.context]))?;
    let next = model::rows(samples.iter().map(|sample| &sample[1..]))?;
    Ok((input, next))
}

/// Fails if the ranks have different options or texts.
fn agree(comm: &mut Communicator, options: &Options, text: &Text) -> Result<(), DemoError> {
    let Options {
        micro_batches, steps, seed, samples, learning_rate, save, save_every, load, compress, ..
    } = options;
    let checkpoints = format!("{save:?} {save_every} {load:?}");
    let settings = format!(
        "{:?} {micro_batches} {steps} {seed} {samples} {learning_rate} {checkpoints} {compress:?}",
        options.shape()
    );
    same_on_all(comm, crc32fast::hash(settings.as_bytes()), "options")?;
    same_on_all(comm, crc32fast::hash(text.bytes()), "text")
}

fn same_on_all(comm: &mut Communicator, own: u32, what: &'static str) -> Result<(), DemoError> {
    let mut all = vec![0; comm.world_size()];
    comm.all_gather(&[own], &mut all)?;
    match all.iter().position(|&other| other != all[0]) {
        None => Ok(()),
        Some(rank) => Err(DemoError::Differ { rank, what }),
    }
}

fn bytes(values: Values<'_>) -> &[u8] {
    match values {
        Values::F32(values) => bytemuck::cast_slice(values),
        Values::F64(values) => bytemuck::cast_slice(values),
        Values::F16(values) => bytemuck::cast_slice(values),
        Values::Bf16(values) => bytemuck::cast_slice(values),
    }
}

const PROMPT_LEN: usize = 32;
const SAMPLE_LEN: usize = 300;

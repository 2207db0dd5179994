//! Trains a convolutional network to read digits on one process, like candle's examples. `digits` does the same on
//! many.
//!
//! `cargo run --release -p dist-candle --example digits_alone -- [EPOCHS] [DROPOUT] [FILE]`
#![allow(clippy::print_stdout, reason = "the example prints its progress")]

mod digits_data;

use std::error::Error;
use std::path::Path;

use candle_core::{D, DType, Device, Tensor};
use candle_nn::{AdamW, Conv2d, Dropout, Linear, Module, ModuleT, Optimizer, VarBuilder, VarMap};

const BATCH: usize = 48;

struct ConvNet {
    conv: Conv2d,
    hidden: Linear,
    head: Linear,
    dropout: Dropout,
}

impl ConvNet {
    fn new(drop_p: f32, vars: &VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            conv: candle_nn::conv2d(1, 8, 3, Default::default(), vars.pp("conv"))?,
            hidden: candle_nn::linear(8 * 5 * 5, 32, vars.pp("hidden"))?,
            head: candle_nn::linear(32, 10, vars.pp("head"))?,
            dropout: Dropout::new(drop_p),
        })
    }
}

impl ModuleT for ConvNet {
    fn forward_t(&self, images: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        let images = images.reshape(((), 1, 12, 12))?;
        let features = self.conv.forward(&images)?.max_pool2d(2)?.flatten_from(1)?;
        let hidden = self.hidden.forward(&features)?.relu()?;
        self.head.forward(&self.dropout.forward_t(&hidden, train)?)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let epochs: usize = arguments.next().map_or(Ok(10), |epochs| epochs.parse())?;
    let drop_p: f32 = arguments.next().map_or(Ok(0.25), |drop_p| drop_p.parse())?;
    let file = arguments.next();

    let data = digits_data::load()?;
    let mut varmap = VarMap::new();
    let model = ConvNet::new(drop_p, &VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    if let Some(file) = file.as_ref().filter(|file| Path::new(file).exists()) {
        varmap.load(file)?;
    }
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.01)?;

    for epoch in 1..=epochs {
        let mut sum_loss = 0.0;
        for start in (0..data.train_labels.dim(0)?).step_by(BATCH) {
            let images = data.train_images.narrow(0, start, BATCH)?;
            let labels = data.train_labels.narrow(0, start, BATCH)?;
            let logits = model.forward_t(&images, true)?;
            let loss = candle_nn::loss::cross_entropy(&logits, &labels)?;
            optimizer.backward_step(&loss)?;
            sum_loss += loss.to_scalar::<f32>()?;
        }
        let logits = model.forward_t(&data.test_images, false)?;
        let hits = logits.argmax(D::Minus1)?.eq(&data.test_labels)?.to_dtype(DType::F32)?;
        println!(
            "epoch {epoch}: loss {sum_loss:.3}, {:.1} % right",
            100.0 * hits.mean_all()?.to_scalar::<f32>()?
        );
    }
    if let Some(file) = file {
        varmap.save(file)?;
    }
    Ok(())
}

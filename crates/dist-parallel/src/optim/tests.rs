//! Compares the optimizers with their formulas for one value.

use half::{bf16, f16};
use rstest::rstest;

use super::*;
use crate::ParamInfo;
use crate::flat::Flat;

/// The state of one value under the textbook formulas of AdamW.
#[derive(Default)]
struct ScalarAdamW {
    t: i32,
    m: f64,
    v: f64,
}

impl ScalarAdamW {
    fn step(&mut self, o: &AdamWOptions, p: f64, g: f64) -> f64 {
        let coupled = if o.decay == WeightDecay::InGradient { o.weight_decay } else { 0.0 };
        let g = g + coupled * p;
        self.t += 1;
        self.m = o.beta1 * self.m + (1.0 - o.beta1) * g;
        self.v = o.beta2 * self.v + (1.0 - o.beta2) * g * g;
        let unbiased_m = self.m / (1.0 - o.beta1.powi(self.t));
        let unbiased_v = self.v / (1.0 - o.beta2.powi(self.t));
        let p = p - o.learning_rate * (o.weight_decay - coupled) * p;
        p - o.learning_rate * unbiased_m / (unbiased_v.sqrt() + o.epsilon)
    }
}

/// The state of one value under the formulas of Lion.
#[derive(Default)]
struct ScalarLion(f64);

impl ScalarLion {
    fn step(&mut self, o: &LionOptions, p: f64, g: f64) -> f64 {
        let direction = o.beta1 * self.0 + (1.0 - o.beta1) * g;
        self.0 = o.beta2 * self.0 + (1.0 - o.beta2) * g;
        let sign = f64::from(u8::from(direction > 0.0)) - f64::from(u8::from(direction < 0.0));
        p - o.learning_rate * sign - o.learning_rate * o.weight_decay * p
    }
}

/// The state of one value under the formulas of SGD.
#[derive(Default)]
struct ScalarSgd {
    v: Option<f64>,
}

impl ScalarSgd {
    fn step(&mut self, o: &SgdOptions, p: f64, g: f64) -> f64 {
        let g = g + o.weight_decay * p;
        let direction = match o.momentum {
            Momentum::None => g,
            Momentum::Plain(factor) | Momentum::Nesterov(factor) => {
                let v = self.v.map_or(g, |v| factor * v + g);
                self.v = Some(v);
                if o.momentum == Momentum::Nesterov(factor) { g + factor * v } else { v }
            }
        };
        p - o.learning_rate * direction
    }
}

/// Returns gradients that change sign and size from step to step, and are exact in every type.
fn gradients(step: usize) -> Vec<f32> {
    let sizes = [0.125, 0.25, 1.0, 64.0, 0.125, 0.125, 8.0];
    let numbers = (0..LEN).map(|index| (step * 31 + index * 17) % 23);
    numbers
        .zip(sizes)
        .map(|(number, size)| (f32::from(u8::try_from(number).unwrap()) - 11.0) * size)
        .collect()
}

const LEN: usize = 7;
const STEPS: usize = 20;

#[track_caller]
fn check(optimizer: &mut dyn Optimizer, mut reference: impl FnMut(usize, f64, f64) -> f64) {
    let mut singles = [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0_f32];
    let mut doubles = singles.map(f64::from);
    let mut expected = doubles;
    for step in 0..STEPS {
        let rounded = gradients(step);
        let gradients: Vec<f64> = rounded.iter().map(|&g| f64::from(g)).collect();
        optimizer.update(0, (&mut doubles[..]).into(), (&*gradients).into()).unwrap();
        optimizer.update(1, (&mut singles[..]).into(), (&*rounded).into()).unwrap();
        for (index, p) in expected.iter_mut().enumerate() {
            *p = reference(index, *p, gradients[index]);
        }
    }
    for ((p, double), single) in expected.into_iter().zip(doubles).zip(singles) {
        assert!((double - p).abs() <= 1e-13 * p.abs().max(1.0), "{double} is not {p}");
        assert!((f64::from(single) - p).abs() <= 2e-5 * p.abs().max(1.0), "{single} is not {p}");
    }
}

#[rstest]
#[case::plain(Momentum::None, 0.0)]
#[case::decay(Momentum::None, 0.1)]
#[case::momentum(Momentum::Plain(0.9), 0.0)]
#[case::all(Momentum::Plain(0.5), 0.01)]
#[case::nesterov(Momentum::Nesterov(0.9), 0.0)]
#[case::nesterov_decay(Momentum::Nesterov(0.9), 0.05)]
fn sgd_follows_its_formulas(#[case] momentum: Momentum, #[case] weight_decay: f64) {
    let options = SgdOptions { learning_rate: 0.05, momentum, weight_decay };
    let mut scalars: [ScalarSgd; LEN] = Default::default();
    let reference = |index: usize, p, g| scalars[index].step(&options, p, g);
    check(&mut Sgd::new(options).unwrap(), reference);
}

#[rstest]
#[case::defaults(AdamWOptions::default())]
#[case::no_decay(AdamWOptions { weight_decay: 0.0, ..AdamWOptions::default() })]
#[case::large_steps(AdamWOptions { learning_rate: 0.1, weight_decay: 0.5, ..AdamWOptions::default() })]
#[case::no_memory(AdamWOptions { beta1: 0.0, beta2: 0.0, epsilon: 0.5, ..AdamWOptions::default() })]
#[case::adam(AdamWOptions::adam())]
#[case::adam_with_decay(AdamWOptions { weight_decay: 0.1, ..AdamWOptions::adam() })]
fn adamw_follows_its_formulas(#[case] options: AdamWOptions) {
    let mut scalars: [ScalarAdamW; LEN] = Default::default();
    let reference = |index: usize, p, g| scalars[index].step(&options, p, g);
    check(&mut AdamW::new(options).unwrap(), reference);
}

#[rstest]
#[case::defaults(LionOptions::default())]
#[case::decay(LionOptions { learning_rate: 0.01, weight_decay: 0.1, ..LionOptions::default() })]
#[case::no_memory(LionOptions { beta1: 0.0, beta2: 0.0, ..LionOptions::default() })]
fn lion_follows_its_formulas(#[case] options: LionOptions) {
    let mut scalars: [ScalarLion; LEN] = Default::default();
    let reference = |index: usize, p, g| scalars[index].step(&options, p, g);
    check(&mut Lion::new(options).unwrap(), reference);
}

/// The kinds of optimizers that have state.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Sgd,
    AdamW,
    Adam,
    Lion,
}

impl Kind {
    fn optimizer(self) -> Box<dyn Optimizer> {
        self.decaying(0.01, None)
    }

    fn decaying(self, weight_decay: f64, groups: Option<ParamGroups>) -> Box<dyn Optimizer> {
        self.grouped(weight_decay, groups).unwrap()
    }

    fn grouped(self, weight_decay: f64, groups: Option<ParamGroups>) -> Result<Box<dyn Optimizer>> {
        let groups = groups.unwrap_or(ParamGroups::new(&infos())?);
        let learning_rate = 0.05;
        Ok(match self {
            Self::Sgd => {
                let options = SgdOptions { learning_rate, momentum: Momentum::Nesterov(0.9), weight_decay };
                Box::new(Sgd::new(options)?.with_groups(groups)?)
            }
            Self::AdamW => {
                let options = AdamWOptions { learning_rate, weight_decay, ..AdamWOptions::default() };
                Box::new(AdamW::new(options)?.with_groups(groups)?)
            }
            Self::Adam => {
                let options = AdamWOptions { learning_rate, weight_decay, ..AdamWOptions::adam() };
                Box::new(AdamW::new(options)?.with_groups(groups)?)
            }
            Self::Lion => {
                let options = LionOptions { learning_rate, weight_decay, ..LionOptions::default() };
                Box::new(Lion::new(options)?.with_groups(groups)?)
            }
        })
    }
}

/// Returns the arrays and scalars of a slice, if it has any.
fn state(optimizer: &dyn Optimizer, slice: usize) -> Option<(Vec<Values<'_>>, &[f64])> {
    let state = optimizer.states()?.get(slice)?;
    Some((state.arrays(), state.scalars()))
}

/// Returns a matrix, a vector, another matrix, and a parameter tied to the first.
fn infos() -> Vec<ParamInfo> {
    let shapes = [("w", vec![LEN, 1]), ("b", vec![LEN]), ("e", vec![1, LEN]), ("again", vec![LEN, 1])];
    let mut infos = Vec::from(shapes.map(|(name, shape)| ParamInfo::new(name, shape, FloatType::F32)));
    infos[3].same_as = Some(0);
    infos
}

/// Returns groups in which only matrices decay, and one matrix has its own learning rate and decay.
fn groups() -> ParamGroups {
    let mut groups = ParamGroups::new(&infos()).unwrap();
    for (info, options) in groups.iter_mut().filter(|(info, _)| info.shape.len() < 2) {
        assert_eq!(info.name, "b");
        options.weight_decay = Some(0.0);
    }
    *groups.named("e").unwrap() = ParamOptions { learning_rate_factor: 0.3, weight_decay: Some(0.2) };
    groups
}

#[rstest]
fn a_group_steps_like_an_optimizer_of_its_own(
    #[values(Kind::Sgd, Kind::AdamW, Kind::Adam, Kind::Lion)] kind: Kind,
) {
    let mut grouped = kind.decaying(0.01, Some(groups()));
    let mut own =
        [(0.01, 1.0), (0.0, 1.0), (0.2, 0.3)].map(|(decay, factor)| (kind.decaying(decay, None), factor));
    let mut parameters = [[0.5_f32; LEN]; 3];
    let mut expected = parameters;
    for step in 0..STEPS {
        let (gradients, rate) = (gradients(step), 0.05 / (step + 1) as f64);
        grouped.set_learning_rate(rate).unwrap();
        for (slice, (own, factor)) in own.iter_mut().enumerate() {
            grouped.update(slice, (&mut parameters[slice][..]).into(), (&*gradients).into()).unwrap();
            own.set_learning_rate(rate * *factor).unwrap();
            own.update(0, (&mut expected[slice][..]).into(), (&*gradients).into()).unwrap();
        }
    }
    assert_eq!(
        parameters.map(|slice| slice.map(f32::to_bits)),
        expected.map(|slice| slice.map(f32::to_bits))
    );
    let [all, undecayed, other] = expected;
    assert!(all != undecayed && all != other && undecayed != other);
    assert_eq!(grouped.learning_rate(), 0.05 / STEPS as f64);
    for (slice, (own, _)) in own.iter().enumerate() {
        assert_eq!(state(&*grouped, slice), state(&**own, 0));
    }
}

#[test]
fn another_name_of_a_parameter_has_its_options() {
    let mut groups = groups();
    groups.named("again").unwrap().learning_rate_factor = 0.0;
    assert_eq!(groups.named("w").unwrap().learning_rate_factor, 0.0);
    assert_eq!(groups.iter_mut().map(|(info, _)| &*info.name).collect::<Vec<_>>(), ["w", "b", "e"]);
    let mut sgd = Sgd::new(SgdOptions::default()).unwrap().with_groups(groups).unwrap();
    for slice in [0, 3] {
        let mut parameters = [1.0_f32; LEN];
        sgd.update(slice, (&mut parameters[..]).into(), (&[1.0_f32; LEN][..]).into()).unwrap();
        assert_eq!(parameters, [1.0; LEN]);
    }
}

#[test]
fn groups_that_make_no_sense_are_refused() {
    let error = groups().named("missing").unwrap_err();
    assert!(matches!(&error, Error::UnknownName { name } if name == "missing"), "{error}");
    let mut infos = infos();
    infos[1].name = "w".to_owned();
    assert!(matches!(ParamGroups::new(&infos), Err(Error::DuplicateName { name }) if name == "w"));

    let refused = [
        (ParamOptions { weight_decay: Some(-0.1), ..ParamOptions::default() }, "the weight decay"),
        (ParamOptions { weight_decay: Some(f64::NAN), ..ParamOptions::default() }, "the weight decay"),
        (
            ParamOptions { learning_rate_factor: -1.0, ..ParamOptions::default() },
            "the factor of the learning rate",
        ),
        (
            ParamOptions { learning_rate_factor: f64::INFINITY, ..ParamOptions::default() },
            "the factor of the learning rate",
        ),
    ];
    for (options, expected) in refused {
        let mut groups = groups();
        *groups.named("b").unwrap() = options;
        for kind in [Kind::Sgd, Kind::AdamW, Kind::Lion] {
            let error = kind.grouped(0.0, Some(groups.clone())).map(drop).unwrap_err();
            let (parameter, name) = match &error {
                Error::ParamSetting { parameter, name, .. } => (&**parameter, *name),
                other => panic!("{other}"),
            };
            assert_eq!((parameter, name), ("b", expected));
        }
    }
}

#[test]
fn a_slice_of_another_model_than_that_of_the_groups_is_refused() {
    for kind in [Kind::Sgd, Kind::AdamW, Kind::Lion] {
        let mut optimizer = kind.decaying(0.0, Some(groups()));
        let mut parameters = [1.0_f32; LEN];
        let outcome = optimizer.update(4, (&mut parameters[..]).into(), (&[1.0_f32; LEN][..]).into());
        assert!(matches!(outcome, Err(Error::SliceWithoutGroup { slice: 4, parameters: 4 })), "{outcome:?}");
        assert_eq!((parameters, state(&*optimizer, 4)), ([1.0; LEN], None));
    }
}

/// A step of a half type is the step of `f32`, with the parameter rounded.
#[rstest]
fn half_types_are_calculated_in_f32(#[values(Kind::Sgd, Kind::AdamW, Kind::Adam)] kind: Kind) {
    let [mut halves, mut singles] = [kind.optimizer(), kind.optimizer()];
    let mut brains = vec![bf16::from_f32(0.3); LEN];
    let mut shorts = vec![f16::from_f32(0.3); LEN];
    for step in 0..STEPS {
        let gradients = gradients(step);
        let mut expected: Vec<f32> = brains.iter().map(|p| p.to_f32()).collect();
        singles.update(0, (&mut *expected).into(), (&*gradients).into()).unwrap();
        let of_half: Vec<bf16> = gradients.iter().map(|&g| bf16::from_f32(g)).collect();
        assert!(
            of_half.iter().zip(&gradients).all(|(half, &g)| half.to_f32() == g),
            "the gradients are exact"
        );
        halves.update(0, (&mut *brains).into(), (&*of_half).into()).unwrap();
        assert_eq!(brains, Vec::from_iter(expected.into_iter().map(bf16::from_f32)));

        let mut expected: Vec<f32> = shorts.iter().map(|p| p.to_f32()).collect();
        singles.update(1, (&mut *expected).into(), (&*gradients).into()).unwrap();
        let of_half: Vec<f16> = gradients.iter().map(|&g| f16::from_f32(g)).collect();
        halves.update(1, (&mut *shorts).into(), (&*of_half).into()).unwrap();
        assert_eq!(shorts, Vec::from_iter(expected.into_iter().map(f16::from_f32)));
    }
}

#[rstest]
fn a_slice_cut_in_two_makes_the_same_steps(
    #[values(Kind::Sgd, Kind::AdamW, Kind::Adam, Kind::Lion)] kind: Kind,
) {
    let [mut whole, mut cut] = [kind.optimizer(), kind.optimizer()];
    let mut together = vec![0.5_f32; LEN];
    let mut apart = together.clone();
    for step in 0..STEPS {
        let gradients = gradients(step);
        whole.update(0, (&mut *together).into(), (&*gradients).into()).unwrap();
        cut.update(1, (&mut apart[..3]).into(), (&gradients[..3]).into()).unwrap();
        cut.update(2, (&mut apart[3..]).into(), (&gradients[3..]).into()).unwrap();
    }
    assert_eq!(together, apart);
}

#[rstest]
fn a_learning_rate_of_zero_stands_still_until_it_is_raised(
    #[values(Kind::Sgd, Kind::AdamW, Kind::Adam, Kind::Lion)] kind: Kind,
) {
    let mut optimizer = kind.optimizer();
    let mut parameters = [1.0_f64, -2.0];
    optimizer.set_learning_rate(0.0).unwrap();
    optimizer.update(0, (&mut parameters[..]).into(), (&[3.0_f64, 4.0][..]).into()).unwrap();
    assert_eq!(parameters, [1.0, -2.0]);
    optimizer.set_learning_rate(0.5).unwrap();
    assert_eq!(optimizer.learning_rate(), 0.5);
    optimizer.update(0, (&mut parameters[..]).into(), (&[3.0_f64, 4.0][..]).into()).unwrap();
    assert!(parameters[0] < 1.0 && parameters[1] < -2.0);
}

#[rstest]
fn slices_that_do_not_fit_are_refused(#[values(Kind::Sgd, Kind::AdamW, Kind::Adam, Kind::Lion)] kind: Kind) {
    let mut optimizer = kind.optimizer();
    let mut parameters = [1.0_f32; 3];
    let error = optimizer.update(0, (&mut parameters[..]).into(), (&[0.0_f32; 2][..]).into()).unwrap_err();
    assert!(matches!(error, Error::ValuesDiffer { expected_len: 3, got_len: 2, .. }), "{error}");
    let error = optimizer.update(0, (&mut parameters[..]).into(), (&[0.0_f64; 3][..]).into()).unwrap_err();
    assert!(matches!(error, Error::ValuesDiffer { .. }), "{error}");
    optimizer.update(0, (&mut parameters[..]).into(), (&[1.0_f32; 3][..]).into()).unwrap();
    let changed = [
        optimizer.update(0, (&mut parameters[..2]).into(), (&[1.0_f32; 2][..]).into()),
        optimizer.update(0, (&mut [0.0_f64; 3][..]).into(), (&[1.0_f64; 3][..]).into()),
    ];
    for error in changed {
        assert!(matches!(error, Err(Error::SliceChanged { slice: 0 })), "{error:?}");
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let sgd = |learning_rate, momentum, weight_decay| {
        Sgd::new(SgdOptions { learning_rate, momentum, weight_decay }).map(drop)
    };
    let adamw = |change: fn(&mut AdamWOptions)| {
        let mut options = AdamWOptions::default();
        change(&mut options);
        AdamW::new(options).map(drop)
    };
    let refused = [
        ("the learning rate", sgd(-1.0, Momentum::None, 0.0)),
        ("the learning rate", sgd(f64::NAN, Momentum::None, 0.0)),
        ("the momentum", sgd(0.1, Momentum::Nesterov(f64::INFINITY), 0.0)),
        ("the weight decay", sgd(0.1, Momentum::None, -0.1)),
        ("beta1", adamw(|options| options.beta1 = 1.0)),
        ("beta2", adamw(|options| options.beta2 = -0.1)),
        ("epsilon", adamw(|options| options.epsilon = f64::NAN)),
        ("beta2", Lion::new(LionOptions { beta2: 1.0, ..LionOptions::default() }).map(drop)),
        ("the learning rate", Kind::Sgd.optimizer().set_learning_rate(-1.0)),
    ];
    for (expected, result) in refused {
        assert!(matches!(result, Err(Error::Setting { name, .. }) if name == expected), "{result:?}");
    }
}

fn rounded(dtype: FloatType, values: &[f32]) -> Flat {
    let mut flat = Flat::zeros(dtype, values.len());
    flat.slice_mut(0, values.len()).convert_from(values.into());
    flat
}

/// Copies the state of slice 0 of `from` to slice `slice` of `to`.
fn hand_over(from: &dyn Optimizer, to: &mut dyn Optimizer, slice: usize, dtype: FloatType) {
    let (arrays, scalars) = state(from, 0).unwrap();
    let states = to.states_mut().unwrap();
    assert_eq!(states.optimizer(), name_of(from));
    let layout: Vec<_> = states.arrays(dtype).map(|(_, dtype)| dtype).collect();
    assert_eq!(arrays.iter().map(Values::dtype).collect::<Vec<_>>(), layout);
    let into = states.restart(slice, dtype, LEN);
    for (mut array, values) in into.arrays_mut().into_iter().zip(arrays) {
        array.copy_from(values).unwrap();
    }
    into.scalars_mut().copy_from_slice(scalars);
}

#[rstest]
fn an_optimizer_with_the_state_of_another_goes_on_like_it(
    #[values(Kind::Sgd, Kind::AdamW, Kind::Adam, Kind::Lion)] kind: Kind,
    #[values(FloatType::F32, FloatType::F64, FloatType::F16, FloatType::Bf16)] dtype: FloatType,
) {
    let [mut first, mut second] = [kind.optimizer(), kind.optimizer()];
    let mut parameters = Flat::zeros(dtype, LEN);
    let step = |optimizer: &mut dyn Optimizer, slice, parameters: &mut Flat, step| {
        let exact = rounded(dtype, &gradients(step));
        optimizer.update(slice, parameters.slice_mut(0, LEN), exact.slice(0, LEN)).unwrap();
    };
    assert_eq!(state(&*first, 0), None);
    for number in 0..STEPS {
        step(&mut *first, 0, &mut parameters, number);
    }
    hand_over(&*first, &mut *second, 3, dtype);
    let mut copy = Flat::zeros(dtype, LEN);
    copy.slice_mut(0, LEN).copy_from(parameters.slice(0, LEN)).unwrap();
    for number in STEPS..2 * STEPS {
        step(&mut *first, 0, &mut parameters, number);
        step(&mut *second, 3, &mut copy, number);
    }
    assert_eq!(copy.slice(0, LEN), parameters.slice(0, LEN));
    second.states_mut().unwrap().clear();
    assert_eq!(state(&*second, 3), None);
}

#[test]
fn without_momentum_nothing_is_kept() {
    let mut sgd = Sgd::new(SgdOptions::default()).unwrap();
    sgd.update(0, (&mut [1.0_f32][..]).into(), (&[1.0_f32][..]).into()).unwrap();
    let states = sgd.states().unwrap();
    assert_eq!((states.iter().count(), states.arrays(FloatType::F32).count()), (0, 0));
}

/// An optimizer as a user would write it, without state.
struct Halving;

impl OptimizerState for Halving {}

impl Optimizer for Halving {
    fn update(&mut self, _: usize, mut parameters: ValuesMut<'_>, _: Values<'_>) -> Result<()> {
        parameters.scale(0.5);
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        0.5
    }
}

#[test]
fn an_optimizer_without_state_has_two_methods() {
    let error = Halving.set_learning_rate(0.1).unwrap_err();
    assert!(matches!(error, Error::FixedLearningRate { optimizer: "stateless" }), "{error}");
    assert!(Halving.states().is_none() && Halving.states_mut().is_none());
    assert_eq!(Halving.settings(), [OptimizerSetting::new("the learning rate", 0.5)]);
}

#[test]
fn a_rule_for_another_number_of_arrays_is_refused() {
    let mut states = SliceStates::new("mine", &["mean", "square"], &[]);
    let mut parameters = [1.0_f32; LEN];
    let outcome =
        states.update(0, (&mut parameters[..]).into(), (&[1.0_f32; LEN][..]).into(), |p, _, []| *p = 0.0);
    let is_refused = matches!(outcome, Err(Error::StateArrays { optimizer: "mine", has: 2, needs: 0 }));
    assert!(is_refused, "{outcome:?}");
    assert_eq!(parameters, [1.0; LEN]);
}

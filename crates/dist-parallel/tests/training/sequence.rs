//! Blocks one after another.

use dist_parallel::model::{Ready, Saved};
use dist_parallel::{Block, BoxError, Error, FloatType, ParamInfo, Params, Sequence, Values, ValuesMut};
use rstest::rstest;

use crate::plain::{Linear, Relu, Rows, micro_batch, model, squared_error};

fn loss(model: &mut Sequence<Rows>) -> f32 {
    let (input, target) = micro_batch(1, 2);
    let (output, _) = model.forward(input).unwrap();
    squared_error(target)(output).unwrap().0
}

/// Adds to one value of a parameter.
fn nudge(model: &mut Sequence<Rows>, parameter: usize, value: usize, by: f32) {
    let mut add = |values: ValuesMut<'_>| {
        let ValuesMut::F32(values) = values else { panic!("the model is f32") };
        values[value] += by;
    };
    model.write(parameter, &mut add).unwrap();
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    const STEP: f32 = 1e-2;
    let mut model = model(3);
    let (input, target) = micro_batch(1, 2);
    let (output, saved) = model.forward(input).unwrap();
    let (_, of_output) = squared_error(target)(output).unwrap();
    let mut gradients: Vec<Vec<f32>> = model.infos().iter().map(|info| vec![0.0; info.len()]).collect();
    let homes: Vec<usize> =
        model.infos().iter().enumerate().map(|(i, info)| info.same_as.unwrap_or(i)).collect();
    let mut order = Vec::new();
    let mut ready = |index: usize, values: Values<'_>| {
        let Values::F32(values) = values else { panic!("the model is f32") };
        gradients[homes[index]].iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        order.push(index);
        Ok(())
    };
    let of_input = model.backward(saved, of_output, &mut ready).unwrap();
    assert_eq!(of_input.unwrap().len(), 6);
    assert_eq!(order, [7, 6, 5, 4, 3, 2, 1, 0], "each once, last to first");
    for (parameter, gradient) in gradients.iter().enumerate().filter(|(index, _)| homes[*index] == *index) {
        for (value, gradient) in gradient.iter().enumerate() {
            nudge(&mut model, parameter, value, STEP);
            let above = loss(&mut model);
            nudge(&mut model, parameter, value, -2.0 * STEP);
            let slope = (above - loss(&mut model)) / (2.0 * STEP);
            nudge(&mut model, parameter, value, STEP);
            assert!((slope - gradient).abs() < 2e-3, "parameter {parameter}: {gradient} is not {slope}");
        }
    }
}

#[test]
fn several_forwards_may_come_before_their_backwards() {
    let mut model = model(3);
    let mut gradients_of = |order: [usize; 2]| {
        let mut saved: Vec<Option<(Rows, Saved)>> = (0..2)
            .map(|index| {
                let (input, target) = micro_batch(0, index);
                let (output, saved) = model.forward(input).unwrap();
                Some((squared_error(target)(output).unwrap().1, saved))
            })
            .collect();
        let mut gradients = vec![Vec::new(), Vec::new()];
        for index in order {
            let (of_output, saved) = saved[index].take().unwrap();
            let mut ready = |parameter: usize, values: Values<'_>| {
                let Values::F32(values) = values else { panic!("the model is f32") };
                gradients[index].push((parameter, values.to_vec()));
                Ok(())
            };
            model.backward(saved, of_output, &mut ready).unwrap();
        }
        gradients
    };
    assert_eq!(gradients_of([0, 1]), gradients_of([1, 0]));
}

#[test]
fn parameters_are_reached_through_the_blocks_that_have_them() {
    let blocks: Vec<Box<dyn Block<Rows>>> = vec![
        Box::new(Relu),
        Box::new(Linear::new("a", 1, 1, 1)),
        Box::new(Relu),
        Box::new(Relu),
        Box::new(Linear::new("b", 1, 1, 2)),
        Box::new(Relu),
    ];
    let mut model = Sequence::new(blocks).unwrap();
    let names: Vec<&str> = model.infos().iter().map(|info| &*info.name).collect();
    assert_eq!(names, ["a.weight", "a.bias", "b.weight", "b.bias"]);
    for index in 0..4_u8 {
        let mut set = |values: ValuesMut<'_>| {
            let ValuesMut::F32(values) = values else { panic!("the model is f32") };
            values.fill(index.into());
        };
        model.write(index.into(), &mut set).unwrap();
    }
    for index in 0..4_u8 {
        let mut compare = |values: Values<'_>| assert_eq!(values, Values::F32(&[index.into()]));
        model.read(index.into(), &mut compare).unwrap();
    }
    assert!(model.read(4, &mut |_| panic!("there is no fifth parameter")).is_err());
    assert!(model.write(4, &mut |_| panic!("there is no fifth parameter")).is_err());
}

#[test]
fn ties_between_blocks_are_checked() {
    let mut tied = model(1);
    let refused = [
        ("first.weight", "again.weight", "the other does not come first"),
        ("last.weight", "first.weight", "they differ in shape or type"),
        ("last.bias", "first.bias", "they differ in shape or type"),
    ];
    for (name, same_as, expected) in refused {
        let error = tied.tie(name, same_as).unwrap_err();
        assert!(matches!(error, Error::CannotTie { reason, .. } if reason == expected), "{error}");
    }
    let unknown = tied.tie("last.weights", "first.weight").unwrap_err();
    assert!(matches!(unknown, Error::UnknownName { name } if name == "last.weights"));
    let ties: Vec<Option<usize>> = tied.infos().iter().map(|info| info.same_as).collect();
    assert_eq!(ties, [None, None, Some(0), None, None, None, None, None], "refused ties leave nothing");
}

#[test]
fn a_name_cannot_be_used_twice() {
    let blocks: Vec<Box<dyn Block<Rows>>> =
        vec![Box::new(Linear::new("a", 1, 1, 1)), Box::new(Linear::new("a", 1, 1, 2))];
    let error = Sequence::new(blocks).unwrap_err();
    assert!(matches!(error, Error::DuplicateName { name } if name == "a.weight"));
}

#[test]
fn activations_of_another_block_are_refused() {
    let mut short = Sequence::<Rows>::new(vec![Box::new(Relu)]).unwrap();
    let mut long = Sequence::<Rows>::new(vec![Box::new(Relu), Box::new(Relu)]).unwrap();
    let (_, saved) = short.forward(vec![1.0]).unwrap();
    let error = long.backward(saved, vec![1.0], &mut |_, _| Ok(())).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Error::ForeignSaved)), "{error}");
    let error = long.backward(Saved::new(3), vec![1.0], &mut |_, _| Ok(())).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(Error::ForeignSaved)), "{error}");
}

/// A block that returns its input, and reports a gradient for a parameter that it does not have.
struct Astray {
    infos: [ParamInfo; 1],
    parameter: usize,
    /// The half of the backward that reports.
    late: bool,
}

impl Params for Astray {
    fn infos(&self) -> &[ParamInfo] {
        &self.infos
    }

    fn read(&self, _: usize, f: &mut dyn FnMut(Values<'_>)) -> Result<(), BoxError> {
        f(Values::F32(&[0.0]));
        Ok(())
    }

    fn write(&mut self, _: usize, f: &mut dyn FnMut(ValuesMut<'_>)) -> Result<(), BoxError> {
        f(ValuesMut::F32(&mut [0.0]));
        Ok(())
    }
}

impl Block<Rows> for Astray {
    fn forward(&mut self, input: Rows) -> Result<(Rows, Saved), BoxError> {
        Ok((input, Saved::new(())))
    }

    fn backward(
        &mut self,
        _: Saved,
        gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<Option<Rows>, BoxError> {
        ready(self.parameter, Values::F32(&[1.0]))?;
        Ok(Some(gradient))
    }

    fn input_gradient(
        &mut self,
        saved: Saved,
        gradient: Rows,
        ready: &mut Ready<'_>,
    ) -> Result<(Option<Rows>, Saved), BoxError> {
        let gradient = if self.late { Some(gradient) } else { self.backward(saved, gradient, ready)? };
        Ok((gradient, Saved::new(())))
    }

    fn weight_gradient(&mut self, _: Saved, ready: &mut Ready<'_>) -> Result<(), BoxError> {
        if self.late { ready(self.parameter, Values::F32(&[1.0])) } else { Ok(()) }
    }
}

#[rstest]
fn a_block_reports_no_gradient_for_another_blocks_parameter(
    #[values(1, 2, usize::MAX)] parameter: usize,
    #[values(Some(false), Some(true), None)] half: Option<bool>,
) {
    let late = half.unwrap_or(false);
    let infos = [ParamInfo::new("own", [1], FloatType::F32)];
    let blocks: Vec<Box<dyn Block<Rows>>> = vec![
        Box::new(Linear::new("before", 1, 1, 1)),
        Box::new(Astray { infos, parameter, late }),
        Box::new(Linear::new("behind", 1, 1, 2)),
    ];
    let mut model = Sequence::new(blocks).unwrap();
    let (output, saved) = model.forward(vec![1.0]).unwrap();
    let mut reported = Vec::new();
    let mut ready = |index: usize, _: Values<'_>| {
        reported.push(index);
        Ok(())
    };
    let done = match half {
        None => model.backward(saved, output, &mut ready).map(drop),
        Some(_) => model
            .input_gradient(saved, output, &mut ready)
            .and_then(|(_, half)| model.weight_gradient(half, &mut ready)),
    };
    let error = *done.unwrap_err().downcast::<Error>().unwrap();
    assert!(matches!(error, Error::NoSuchParameter { index, count: 1 } if index == parameter), "{error}");
    assert!(reported.iter().all(|&index| index > 2), "the block behind has reported its own: {reported:?}");
}

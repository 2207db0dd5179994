//! Generates text with a trained model.

use candle_core::{D, Tensor};
use dist_parallel::{Block, BoxError};

use crate::model;
use crate::random::Random;

/// Returns `len` bytes that the model generates after `prompt`, which is not empty. They are the same in every call.
pub(crate) fn continuation(
    model: &mut dyn Block<Tensor>,
    context: usize,
    prompt: &[u8],
    len: usize,
    seed: u64,
) -> Result<Vec<u8>, BoxError> {
    let mut text = prompt.to_vec();
    let mut random = Random::named(seed, "sample");
    for _ in 0..len {
        let seen = &text[text.len().saturating_sub(context)..];
        let (logits, _) = model.forward(model::rows([seen])?)?;
        let last = logits.narrow(D::Minus2, seen.len() - 1, 1)?.flatten_all()?.to_vec1::<f32>()?;
        text.push(draw(&last, random.unit()));
    }
    Ok(text.split_off(prompt.len()))
}

/// Returns the byte at `place`, from 0 to 1, of the cumulative distribution.
fn draw(logits: &[f32], place: f64) -> u8 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let widths = logits.iter().map(|&logit| (f64::from(logit - largest) / TEMPERATURE).exp());
    let mut rest = place * widths.clone().sum::<f64>();
    for (byte, width) in (0..=u8::MAX).zip(widths) {
        rest -= width;
        if rest < 0.0 {
            return byte;
        }
    }
    u8::MAX
}

/// The sampling temperature. Below 1, likely bytes are drawn more often: there is less variety, and there are fewer
/// errors.
const TEMPERATURE: f64 = 0.7;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Shape, transformer};

    #[test]
    fn likely_bytes_are_drawn_and_impossible_ones_are_not() {
        let mut logits = [f32::NEG_INFINITY; 256];
        (logits[10], logits[200]) = (1.0, 1.0);
        assert_eq!([0.0, 0.49, 0.51, 0.999].map(|place| draw(&logits, place)), [10, 10, 200, 200]);
    }

    #[test]
    fn a_sample_may_be_longer_than_the_context_and_is_the_same_every_time() {
        let shape = Shape { layers: 1, width: 8, heads: 2, context: 4 };
        let mut model = transformer(shape, 0).unwrap();
        let samples = [7, 7, 8].map(|seed| continuation(&mut model, 4, b"ab", 12, seed).unwrap());
        assert_eq!(samples[0].len(), 12);
        assert_eq!(samples[0], samples[1]);
        assert_ne!(samples[0], samples[2]);
    }
}

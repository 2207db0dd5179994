//! Dropout with random numbers that depend on the micro-batch and not on the rank.

use candle_core::{Result, Tensor};
use dist_parallel::model::Pass;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

/// Dropout that gives the same bits on any number of ranks, under every strategy, and after a restart.
///
/// In training it sets each value to zero with probability `rate`, and divides the others by `1 − rate`. In
/// an evaluation it returns its input. The random numbers come from ChaCha8, keyed by four numbers: the seed,
/// the [step](Pass::step), the [micro-batch](Pass::micro_batch) and a hash of the layer's name.
///
/// Give each layer a name of its own. Two calls with the same name in one forward pass drop the same
/// positions.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use dist_candle::Dropout;
/// use dist_parallel::model::Pass;
///
/// let dropout = Dropout::new(0.25, 42, "hidden")?;
/// let x = Tensor::ones((2, 1000), DType::F32, &Device::Cpu)?;
/// let pass = Pass { training: true, step: 7, micro_batch: 3 };
/// let y = dropout.forward(&x, pass)?;
/// let zeros = y.flatten_all()?.to_vec1::<f32>()?.iter().filter(|value| **value == 0.0).count();
/// assert!((450..550).contains(&zeros));
/// // In an evaluation nothing is dropped.
/// let same = dropout.forward(&x, Pass { training: false, ..pass })?;
/// assert_eq!(same.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    rate: f64,
    seed: u64,
    layer: u64,
}

impl Dropout {
    /// Creates the dropout of the layer called `layer`. Give all ranks the same seed.
    ///
    /// # Errors
    /// If `rate` is negative, 1 or more, or NaN.
    pub fn new(rate: f64, seed: u64, layer: &str) -> Result<Self> {
        if !(0.0..1.0).contains(&rate) {
            candle_core::bail!("dropout {layer}: the rate is {rate} and must be at least 0 and below 1");
        }
        Ok(Self { rate, seed, layer: hash(layer) })
    }

    /// Returns `x` with some values dropped if `pass.training` is set, else `x` itself. The result has the
    /// shape and type of `x`.
    ///
    /// # Errors
    /// If candle fails.
    pub fn forward(&self, x: &Tensor, pass: Pass) -> Result<Tensor> {
        if !pass.training || self.rate == 0.0 {
            return Ok(x.clone());
        }
        let mut random = self.generator(pass);
        let limit = self.limit();
        let kept = (0..x.elem_count()).map(|_| u8::from(u64::from(random.next_u32()) >= limit));
        let mask = Tensor::from_vec(kept.collect::<Vec<u8>>(), x.shape(), x.device())?;
        x.mul(&mask.to_dtype(x.dtype())?)?.affine(1.0 / (1.0 - self.rate), 0.0)
    }

    /// Returns the threshold: a value is dropped if its 32 random bits are a smaller number.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate below 1 stays below 2^32"
    )]
    fn limit(&self) -> u64 {
        (self.rate * 2_f64.powi(32)).round() as u64
    }

    fn generator(&self, pass: Pass) -> ChaCha8Rng {
        let numbers = [self.seed, pass.step, pass.micro_batch as u64, self.layer];
        let mut key = [0; 32];
        key.chunks_exact_mut(8)
            .zip(numbers)
            .for_each(|(to, number)| to.copy_from_slice(&number.to_le_bytes()));
        ChaCha8Rng::from_seed(key)
    }
}

/// Returns the FNV-1a hash of a name.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use rstest::rstest;

    use super::*;

    fn dropped(rate: f64, seed: u64, layer: &str, pass: Pass) -> Vec<f32> {
        let x = Tensor::ones(16, DType::F32, &Device::Cpu).unwrap();
        Dropout::new(rate, seed, layer).unwrap().forward(&x, pass).unwrap().to_vec1().unwrap()
    }

    const PASS: Pass = Pass { training: true, step: 1, micro_batch: 2 };

    #[test]
    fn values_are_dropped_as_they_were_in_every_earlier_version() {
        let kept = dropped(0.5, 3, "layer", PASS).iter().map(|value| *value != 0.0).collect::<Vec<_>>();
        let pattern: String = kept.iter().map(|kept| if *kept { '1' } else { '0' }).collect();
        assert_eq!(pattern, PATTERN);
        assert!(dropped(0.5, 3, "layer", PASS).iter().all(|value| [0.0, 2.0].contains(value)));
    }

    /// The draws for seed 3, step 1, micro-batch 2 and name "layer".
    const PATTERN: &str = "0001110101100001";

    #[rstest]
    #[case::seed(4, "layer", PASS)]
    #[case::layer(3, "other", PASS)]
    #[case::step(3, "layer", Pass { step: 2, ..PASS })]
    #[case::micro_batch(3, "layer", Pass { micro_batch: 3, ..PASS })]
    fn each_part_of_the_key_changes_what_is_dropped(
        #[case] seed: u64,
        #[case] layer: &str,
        #[case] pass: Pass,
    ) {
        assert_ne!(dropped(0.5, seed, layer, pass), dropped(0.5, 3, "layer", PASS));
    }

    #[test]
    fn a_rate_of_zero_drops_nothing_and_a_rate_of_one_is_refused() {
        assert_eq!(dropped(0.0, 3, "layer", PASS), [1.0; 16]);
        for rate in [1.0, -0.1, f64::NAN] {
            assert!(
                Dropout::new(rate, 3, "layer")
                    .unwrap_err()
                    .to_string()
                    .contains("dropout layer: the rate is")
            );
        }
    }
}

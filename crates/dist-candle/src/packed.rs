//! The encoding of several tensors as one message of 32-bit words, which is sent as `f32`.
//!
//! The first word is the number of tensors. Each tensor has one word with its type and its number of dims,
//! two words for each dim, and its values, padded to a whole word. Words are copied and never computed with,
//! so every bit arrives unchanged.

use candle_core::{DType, Device, Tensor};

use crate::CandleError;

/// Encodes these tensors.
pub(crate) fn pack(tensors: &[Tensor]) -> Result<Vec<f32>, CandleError> {
    let mut bytes = u32::try_from(tensors.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    for tensor in tensors {
        let dtype = tensor.dtype();
        let code = DTYPES.iter().position(|known| *known == dtype).and_then(|code| u8::try_from(code).ok());
        let dims = u8::try_from(tensor.rank()).ok();
        let (Some(code), Some(dims)) = (code, dims) else {
            return Err(CandleError::Type { name: PLACE.to_owned(), dtype });
        };
        bytes.extend([code, dims, 0, 0]);
        tensor.dims().iter().for_each(|&dim| bytes.extend((dim as u64).to_le_bytes()));
        tensor.write_bytes(&mut bytes).map_err(failed)?;
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    Ok(bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

/// Decodes a message.
///
/// # Errors
/// [`Message`](CandleError::Message) if this is no message of [`pack`].
pub(crate) fn unpack(words: &[f32]) -> Result<Vec<Tensor>, CandleError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut rest = Rest(&bytes);
    let [count] = rest.words().ok_or(CandleError::Message)?;
    (0..count).map(|_| rest.tensor()).collect()
}

/// The bytes of a message that are still to be decoded.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn bytes(&mut self, len: usize) -> Option<&[u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn words<const N: usize>(&mut self) -> Option<[u32; N]> {
        let bytes = self.bytes(4 * N)?.as_chunks().0;
        Some(std::array::from_fn(|word| u32::from_le_bytes(bytes[word])))
    }

    fn tensor(&mut self) -> Result<Tensor, CandleError> {
        let (dtype, shape) = self.header().ok_or(CandleError::Message)?;
        let len = shape.iter().try_fold(dtype.size_in_bytes(), |len, &dim| len.checked_mul(dim));
        let values = len.and_then(|len| Some((len, self.bytes(len.checked_next_multiple_of(4)?)?)));
        let (len, values) = values.ok_or(CandleError::Message)?;
        Tensor::from_raw_buffer(&values[..len], dtype, &shape, &Device::Cpu).map_err(failed)
    }

    fn header(&mut self) -> Option<(DType, Vec<usize>)> {
        let [code, dims, ..] = self.words::<1>()?[0].to_le_bytes();
        let dim = |[low, high]: [u32; 2]| usize::try_from(u64::from(high) << 32 | u64::from(low)).ok();
        let shape = (0..dims).map(|_| dim(self.words()?)).collect::<Option<_>>()?;
        Some((*DTYPES.get(usize::from(code))?, shape))
    }
}

fn failed(source: candle_core::Error) -> CandleError {
    CandleError::Candle { place: PLACE.to_owned(), source }
}

const PLACE: &str = "an activation";

/// The tensor types that can be sent. The code of a type is its index.
const DTYPES: [DType; 9] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_every_type_and_shape_arrive_as_they_were() {
        let shapes: [&[usize]; 5] = [&[], &[0], &[5], &[2, 3], &[2, 0, 3]];
        for shape in shapes {
            let count = shape.iter().product::<usize>();
            let numbers = Tensor::arange(0_f32, 8.0, &Device::Cpu).unwrap();
            let numbers = numbers.narrow(0, 0, count).unwrap().reshape(shape).unwrap();
            let tensors = DTYPES.map(|dtype| numbers.to_dtype(dtype).unwrap());
            let again = unpack(&pack(&tensors).unwrap()).unwrap();
            assert_eq!(again.len(), tensors.len());
            for (tensor, again) in tensors.iter().zip(&again) {
                let values = |tensor: &Tensor| {
                    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap()
                };
                assert_eq!((tensor.dtype(), tensor.dims()), (again.dtype(), again.dims()));
                assert_eq!(values(tensor), values(again));
            }
        }
    }

    #[test]
    fn every_bit_arrives() {
        let patterns = [0x7fa0_0001, 0xffff_ffff, 0x8000_0000, 1, 0x7f80_0000];
        let tensor = Tensor::new(&patterns, &Device::Cpu).unwrap();
        let again = unpack(&pack(&[tensor]).unwrap()).unwrap();
        assert_eq!(again[0].to_vec1::<u32>().unwrap(), patterns);
    }

    #[test]
    fn nonsense_is_refused() {
        let tensor = Tensor::new(&[1_f32, 2.0], &Device::Cpu).unwrap();
        let message = pack(&[tensor]).unwrap();
        for len in 0..message.len() {
            assert!(matches!(unpack(&message[..len]), Err(CandleError::Message)), "{len} words");
        }
        let with = |word: usize, value: u32| {
            let mut message = message.clone();
            message[word] = f32::from_bits(value);
            unpack(&message)
        };
        // More tensors, an unknown type, and dims whose product does not fit.
        for (word, value) in [(0, 2), (1, 0x0000_0109), (3, u32::MAX)] {
            assert!(matches!(with(word, value), Err(CandleError::Message)), "word {word}");
        }
    }
}

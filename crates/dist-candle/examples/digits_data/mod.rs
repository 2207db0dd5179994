//! Synthetic images of digits in the shapes of a seven-segment display, shifted and with noise. They need no
//! download.

use candle_core::{Device, Result, Tensor};

/// A set of images and labels. The images have the shape (number, 144): 12 rows of 12 grey values from 0 to
/// 1.
pub(crate) struct Digits {
    pub(crate) train_images: Tensor,
    pub(crate) train_labels: Tensor,
    pub(crate) test_images: Tensor,
    pub(crate) test_labels: Tensor,
}

/// Generates the data, which is the same in every process.
pub(crate) fn load() -> Result<Digits> {
    let (train_images, train_labels) = draw(0..TRAIN)?;
    let (test_images, test_labels) = draw(TRAIN..TRAIN + TEST)?;
    Ok(Digits { train_images, train_labels, test_images, test_labels })
}

const TRAIN: u32 = 480;
const TEST: u32 = 120;
const SIDE: u32 = 12;

/// The segments of each digit: top, top left, top right, middle, bottom left, bottom right, bottom.
const SEGMENTS: [[bool; 7]; 10] = {
    const fn lit(mask: u8) -> [bool; 7] {
        let mut segments = [false; 7];
        let mut index = 0;
        while index < 7 {
            segments[index] = mask >> (6 - index) & 1 == 1;
            index += 1;
        }
        segments
    }
    [
        lit(0b111_0111),
        lit(0b001_0010),
        lit(0b101_1101),
        lit(0b101_1011),
        lit(0b011_1010),
        lit(0b110_1011),
        lit(0b110_1111),
        lit(0b101_0010),
        lit(0b111_1111),
        lit(0b111_1011),
    ]
};

fn draw(numbers: std::ops::Range<u32>) -> Result<(Tensor, Tensor)> {
    let count = numbers.len();
    let labels: Vec<u32> = numbers.clone().map(|number| hash(number) % 10).collect();
    let images: Vec<f32> = numbers.zip(&labels).flat_map(|(number, &label)| image(number, label)).collect();
    let device = &Device::Cpu;
    Ok((
        Tensor::from_vec(images, (count, (SIDE * SIDE) as usize), device)?,
        Tensor::from_vec(labels, count, device)?,
    ))
}

fn image(number: u32, digit: u32) -> impl Iterator<Item = f32> {
    let segments = SEGMENTS[digit as usize];
    let (shift_x, shift_y) = (hash(number + 7_000) % 4, hash(number + 9_000) % 2);
    (0..SIDE * SIDE).map(move |at| {
        let (x, y) = ((at % SIDE).wrapping_sub(shift_x + 1), (at / SIDE).wrapping_sub(shift_y));
        let wide = (1..6).contains(&x);
        let upper = (1..5).contains(&y);
        let lower = (6..10).contains(&y);
        let lit = [
            wide && y == 0,
            x == 0 && upper,
            x == 6 && upper,
            wide && y == 5,
            x == 0 && lower,
            x == 6 && lower,
            wide && y == 10,
        ];
        let shown = segments.iter().zip(lit).any(|(&on, at)| on && at);
        let noise = hash(number * 1_000 + at) % 100;
        if shown { 1.0 - noise as f32 / 400.0 } else { noise as f32 / 800.0 }
    })
}

/// Returns a pseudo-random number.
const fn hash(number: u32) -> u32 {
    let mixed = (number ^ 61 ^ number >> 16).wrapping_mul(9);
    let mixed = (mixed ^ mixed >> 4).wrapping_mul(0x27d4_eb2d);
    mixed ^ mixed >> 15
}

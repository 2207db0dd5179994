//! Timelines as text and as pictures.

mod svg;
mod text;

pub use svg::{Panel, svg};

//! Timelines as text and as SVG.

mod svg;
mod text;

pub use svg::{Panel, svg};

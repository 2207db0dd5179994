//! Runs the unit tests in the modules of the demo. Cargo does not build an example to run it if its tests are
//! enabled.
#![allow(dead_code, reason = "only the demo's main function uses some items")]

#[path = "../examples/train_lm/model.rs"]
mod model;
#[path = "../examples/train_lm/random.rs"]
mod random;
#[path = "../examples/train_lm/sample.rs"]
mod sample;
#[path = "../examples/train_lm/text.rs"]
mod text;

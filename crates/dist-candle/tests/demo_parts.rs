//! The tests that the parts of the demo carry with them: an example that is tested is not built to be run.
#![allow(dead_code, reason = "what only the demo's main function uses")]

#[path = "../examples/train_lm/model.rs"]
mod model;
#[path = "../examples/train_lm/random.rs"]
mod random;
#[path = "../examples/train_lm/sample.rs"]
mod sample;
#[path = "../examples/train_lm/text.rs"]
mod text;

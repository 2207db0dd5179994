//! docs/algorithms.md is generated from the schedules.

use dist_algos::ALGORITHMS;

#[path = "../examples/algorithms/document.rs"]
mod document;

#[test]
fn the_page_on_algorithms_agrees_with_the_schedules() {
    let committed = include_str!("../../../docs/algorithms.md");
    let made = document::algorithms(ALGORITHMS);
    let differs = made.lines().zip(committed.lines()).find(|(made, committed)| made != committed);
    assert!(made == committed, "run cargo xtask docs; the first line that differs: {differs:?}");
}

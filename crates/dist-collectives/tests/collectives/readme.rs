//! The program of the workspace's README is one that compiles.

#[test]
fn the_program_of_the_readme_is_the_example_mean() {
    let example = include_str!("../../examples/mean.rs");
    let program = &example[example.find("\nuse ").unwrap()..];
    assert!(include_str!("../../../../README.md").contains(program), "{program}");
}

//! Small trees, each with one thing wrong, and the rule that must find it.

use super::tree::{Dependency, File, Package, Tree};
use super::{Finding, check};

/// Returns a workspace of two crates without findings.
fn sound() -> Tree {
    let mut tree = Tree { files: Vec::new(), packages: Vec::new() };
    tree.package("dist-transport", &["socket2"], &["dist-testkit"]);
    tree.package("dist-algos", &["dist-transport"], &["dist-testkit", "dist-transport"]);
    tree.file_with("crates/dist-algos/src/lib.rs", "#![doc = include_str!(\"../README.md\")]\n");
    tree.file_with("README.md", "# dist\n");
    tree
}

impl Tree {
    fn package(&mut self, name: &str, normal: &[&str], dev: &[&str]) {
        let dependency = |dev| move |name: &&str| Dependency { name: (*name).to_owned(), dev };
        let dependencies =
            normal.iter().map(dependency(false)).chain(dev.iter().map(dependency(true))).collect();
        self.packages.push(Package { name: name.to_owned(), is_default_member: true, dependencies });
        self.file_with(&format!("crates/{name}/Cargo.toml"), "[lints]\nworkspace = true\n");
        self.file_with(&format!("crates/{name}/README.md"), "# A crate\n");
    }

    fn file_with(&mut self, path: &str, text: &str) {
        self.files.push(File { path: path.to_owned(), text: text.to_owned() });
    }
}

#[track_caller]
fn finds(tree: &Tree, path: &str, part: &str) {
    let findings = check(tree);
    let found = |finding: &Finding| finding.path == path && finding.text.contains(part);
    assert!(findings.len() == 1 && found(&findings[0]), "{findings:#?}");
}

#[track_caller]
fn finds_in_file(path: &str, text: &str, found: &str, part: &str) {
    let mut tree = sound();
    tree.file_with(path, text);
    finds(&tree, found, part);
}

#[track_caller]
fn finds_nothing(path: &str, text: &str) {
    let mut tree = sound();
    tree.file_with(path, text);
    assert_eq!(check(&tree), []);
}

#[test]
fn a_sound_tree_has_no_findings() {
    assert_eq!(check(&sound()), []);
}

#[test]
fn a_dependency_on_a_crate_above_is_found() {
    let mut tree = sound();
    tree.package("dist-groups", &["dist-parallel"], &[]);
    finds(&tree, "crates/dist-groups/Cargo.toml", "depends on dist-parallel");
}

#[test]
fn the_test_kit_is_for_tests_only() {
    let mut tree = sound();
    tree.package("dist-cli", &["dist-testkit"], &[]);
    finds(&tree, "crates/dist-cli/Cargo.toml", "depends on dist-testkit");
}

#[test]
fn a_crate_outside_the_order_is_found() {
    let mut tree = sound();
    tree.package("dist-extra", &[], &[]);
    finds(&tree, "crates/dist-extra/Cargo.toml", "no place in the layer order");
}

#[test]
fn a_framework_is_found_outside_its_crate_even_in_tests() {
    let mut tree = sound();
    tree.package("dist-parallel", &[], &["candle-nn"]);
    tree.package("dist-candle", &["candle-nn"], &[]);
    tree.package("dist", &["dist-candle"], &["candle-nn"]);
    finds(&tree, "crates/dist-parallel/Cargo.toml", "candle");
    let mut tree = Tree::default();
    tree.package("dist-parallel", &[], &["burn-optim"]);
    tree.package("dist-burn", &["burn"], &[]);
    finds(&tree, "crates/dist-parallel/Cargo.toml", "burn");
}

#[test]
fn a_crate_that_a_plain_build_leaves_out_is_found() {
    let mut tree = sound();
    tree.packages[1].is_default_member = false;
    finds(&tree, "crates/dist-algos/Cargo.toml", "default-members");
}

#[test]
fn a_crate_without_lints_or_readme_is_found() {
    let mut tree = sound();
    let name = "dist-groups".to_owned();
    tree.packages.push(Package { name, is_default_member: true, dependencies: Vec::new() });
    let paths: Vec<_> = check(&tree).into_iter().map(|finding| finding.path).collect();
    assert_eq!(paths, ["crates/dist-groups/Cargo.toml", "crates/dist-groups/README.md"]);
}

#[test]
fn a_stranger_in_the_root_folder_is_found() {
    finds_in_file("notes.txt", "", "notes.txt", "root folder");
    finds_nothing(".ci/run", "");
}

#[test]
fn a_file_without_a_header_is_found() {
    let path = "crates/dist-algos/src/ring.rs";
    finds_in_file(path, "use std::fmt;\n", path, "line 1");
    finds_in_file(path, "\n//! Late.\n", path, "line 1");
    finds_nothing(path, "//! Ring schedules.\n");
}

#[test]
fn unsafe_is_found_in_code_only() {
    let path = "crates/dist-algos/src/ring.rs";
    finds_in_file(
        path,
        "//! Ring.\nfn f() {\n    unsafe { g() }\n}\n",
        "crates/dist-algos/src/ring.rs:3",
        "unsafe",
    );
    finds_in_file(
        path,
        "//! Ring.\nconst Q: char = '\"';\nunsafe fn f() {}\n",
        "crates/dist-algos/src/ring.rs:3",
        "",
    );
    finds_nothing(path, "//! Nothing unsafe.\n// unsafe\n/* unsafe */ const A: &str = \"\\\" unsafe\";\n");
    finds_nothing(path, "//! Raw.\n#![forbid(unsafe_code)]\nconst A: &str = r#\"a \" unsafe\"#;\n");
}

#[test]
fn an_empty_file_name_is_found() {
    finds_in_file("crates/dist-algos/src/utils.rs", "//! U.\n", "crates/dist-algos/src/utils.rs", "name");
    finds_in_file(
        "crates/dist-algos/src/common/a.rs",
        "//! U.\n",
        "crates/dist-algos/src/common/a.rs",
        "name",
    );
}

#[test]
fn a_glob_re_export_is_found() {
    let path = "crates/dist-algos/src/ring.rs";
    finds_in_file(path, "//! Ring.\npub use a::*;\n", path, "glob");
    finds_nothing(path, "//! Ring.\nuse super::*;\n");
}

#[test]
fn long_files_and_long_functions_are_warned_of() {
    let path = "crates/dist-algos/src/ring.rs";
    finds_in_file(path, &format!("//! Ring.\n{}", "const A: u8 = 0;\n".repeat(500)), path, "501 lines");
    let function = format!(
        "//! Ring.\nimpl A {{\n    pub(crate) fn f() {{\n{}    }}\n}}\n",
        "        g();\n".repeat(69)
    );
    finds_in_file(path, &function, "crates/dist-algos/src/ring.rs:3", "71 lines");
}

#[test]
fn a_link_to_a_file_or_a_heading_that_is_not_there_is_found() {
    let path = "docs/a.md";
    finds_in_file(path, "[b](b.md)\n", "docs/a.md:1", "no such file");
    finds_in_file(path, "# A\n\n[b](#b)\n", "docs/a.md:3", "no such heading");
    finds_in_file(path, "[b](../README.md#b)\n", "docs/a.md:1", "README.md has no such heading");
    finds_nothing(
        path,
        "# A b\n\n[b](#a-b), [c](../README.md#dist), [d](../crates), [e](https://a.b), [f](a::b)\n",
    );
}

#[test]
fn long_sentences_are_found_in_pages_for_newcomers_only() {
    let sentence = |words: usize| "word ".repeat(words - 1) + "word.\n";
    finds_in_file(
        "README.md",
        &format!("{}{}", sentence(41), sentence(1).repeat(3)),
        "README.md:1",
        "a sentence of 41 words",
    );
    finds_in_file(
        "README.md",
        &format!("{}{}", sentence(21), sentence(20)),
        "README.md",
        "20.5 words on average",
    );
    finds_nothing("README.md", &format!("{}{}", sentence(40), sentence(1).repeat(3)));
    finds_nothing("docs/a.md", &sentence(41));
}

/// Returns a guide with one page.
fn with_page(text: &str) -> Tree {
    let mut tree = sound();
    tree.file_with("docs/book/src/SUMMARY.md", "- [A](a.md)\n");
    tree.file_with("docs/book/src/a.md", text);
    tree
}

#[test]
fn a_page_that_the_guide_does_not_list_is_found() {
    let mut tree = with_page("# A\n");
    assert_eq!(check(&tree), []);
    tree.file_with("docs/book/src/b.md", "# B\n");
    finds(&tree, "docs/book/src/b.md", "does not list");
}

#[test]
fn a_link_out_of_the_guide_is_found() {
    finds(&with_page("[b](../../../README.md)\n"), "docs/book/src/a.md:1", "out of the book");
}

#[test]
fn code_of_the_guide_that_is_not_tested_is_found() {
    let page = "docs/book/src/a.md";
    let mut tree = with_page("```rust\nfn main() {}\n```\n");
    finds(&tree, page, "not tested");
    tree.file_with("docs/book/pages.rs", "//! P.\n#[doc = include_str!(\"src/a.md\")]\npub mod a {}\n");
    assert_eq!(check(&tree), []);
    finds(&with_page("```\na\n```\n"), "docs/book/src/a.md:1", "not of one of");
    tree.files
        .iter_mut()
        .filter(|file| file.path == page)
        .for_each(|file| file.text.insert_str(7, ",ignore"));
    finds(&tree, "docs/book/src/a.md:1", "not compiled");
}

#[test]
fn a_cargo_command_of_the_guide_that_does_not_exist_is_found() {
    let command = |command: &str| {
        let mut tree = with_page(&format!("```console\n$ {command}\n```\n"));
        tree.file_with(".cargo/config.toml", "[alias]\nxtask = \"a\"\ndemo = \"b\"\n");
        tree.file_with("crates/dist-algos/examples/a.rs", "//! A.\n");
        tree
    };
    let page = "docs/book/src/a.md:2";
    finds(&command("cargo dmeo"), page, "no cargo dmeo");
    finds(&command("cd a && cargo xtask boko"), page, "no cargo xtask boko");
    finds(&command("cargo run -p dist-algo"), page, "no package dist-algo");
    finds(&command("cargo run -p dist-algos --example b"), page, "no example b");
    finds(&command("cargo add dist --path ../dist/crates/dits"), page, "no folder");
    for sound in [
        "cargo demo && cargo xtask book",
        "cargo run -p dist-algos --example a -- --example b",
        "cargo install --path crates/dist-algos",
        "cargo run -p my-own",
    ] {
        assert_eq!(check(&command(sound)), [], "{sound}");
    }
}

#[test]
fn a_private_word_is_found_where_it_is_defined_and_only_there() {
    let path = "crates/dist-algos/src/ring.rs";
    let found = "crates/dist-algos/src/ring.rs:2";
    finds_in_file(path, "//! Ring.\nstruct Together;\n", found, "say ShmGroup");
    finds_in_file(path, "//! Ring.\nfn come_together() {}\n", found, "say establish");
    finds_in_file(path, "//! Ring.\nmod gate {}\n", found, "say acceptor");
    finds_in_file(
        "crates/dist-algos/src/step.rs",
        "//! Steps.\nenum Bug {\n    LostPost,\n}\n",
        "crates/dist-algos/src/step.rs:3",
        "say LostSignal",
    );
    finds_nothing(path, "//! Ring.\nfn f(together: Known) -> Way {\n    come_together()\n}\n");
}

#[test]
fn a_word_that_is_private_to_one_crate_is_allowed_in_others() {
    let struct_named_task = "//! Tasks.\nstruct Task;\n";
    finds_in_file("crates/dist-algos/src/a.rs", struct_named_task, "crates/dist-algos/src/a.rs:2", "Task");
    finds_nothing("crates/dist-transport/src/a.rs", struct_named_task);
}

#[test]
fn a_metaphor_is_found_in_comments_messages_and_names() {
    let path = "crates/dist-algos/src/ring.rs";
    let found = "crates/dist-algos/src/ring.rs:2";
    finds_in_file(path, "//! Ring.\n// A stranger takes the core.\n", found, "“stranger”");
    finds_in_file(path, "//! Ring.\nconst A: &str = \"it knocks\";\n", found, "“knock”");
    finds_in_file(path, "//! Ring.\nfn a_stranger_is_refused() {}\n", found, "“stranger”");
    finds_in_file(
        path,
        "//! It copies past the\n//! caches.\n",
        "crates/dist-algos/src/ring.rs:1",
        "non-temporal",
    );
    finds_nothing(path, "//! Ring.\n// `bell` is code.\nfn f() {\n    let bell = 0;\n}\n");
}

#[test]
fn a_long_sentence_of_a_comment_is_found_by_its_line() {
    let path = "crates/dist-algos/src/ring.rs";
    let sentence = |words: usize| format!("//! Ring.\n\n/// {}word.\nstruct A;\n", "word ".repeat(words - 1));
    finds_in_file(path, &sentence(41), "crates/dist-algos/src/ring.rs:3", "a sentence of 41 words");
    finds_nothing(path, &sentence(40));
}

#[test]
fn a_type_name_that_is_defined_twice_is_found_in_a_crate_and_in_one_that_uses_it() {
    let mut tree = sound();
    tree.package("dist-groups", &["dist-algos"], &[]);
    tree.file_with("crates/dist-transport/src/a.rs", "//! A.\nstruct Same;\nenum Error {}\n");
    finds_after(&tree, "crates/dist-transport/src/b.rs", "crates/dist-transport/src/a.rs:2");
    finds_after(&tree, "crates/dist-algos/src/b.rs", "crates/dist-transport/src/a.rs:2");
    finds_after(&tree, "crates/dist-groups/src/b.rs", "crates/dist-transport/src/a.rs:2");
}

/// Adds a second `Same` and an `Error` in this file. Only `Same` may be found.
#[track_caller]
fn finds_after(tree: &Tree, path: &str, first: &str) {
    let mut tree = Tree { files: tree.files.clone(), packages: tree.packages.clone() };
    tree.file_with(path, "//! B.\n\ntype Same = u8;\nenum Error {}\n");
    finds(&tree, &format!("{path}:3"), first);
}

#[test]
fn a_type_name_may_be_repeated_in_crates_that_know_nothing_of_each_other_and_in_tests() {
    let mut tree = sound();
    tree.package("dist-groups", &[], &["dist-algos"]);
    tree.file_with("crates/dist-algos/src/a.rs", "//! A.\nstruct Same;\n");
    tree.file_with("crates/dist-groups/src/a.rs", "//! A.\nstruct Same;\n");
    tree.file_with("crates/dist-algos/tests/a.rs", "//! A.\nstruct Same;\n");
    assert_eq!(check(&tree), []);
}

#[test]
fn comments_that_begin_like_questions_are_counted_per_thousand_words() {
    let text = |questions: usize| {
        let line = |n| if n < questions { "// What it is.\n\n" } else { "// It is it.\n\n" };
        format!("//! Ring.\n{}", (0..200).map(line).collect::<String>())
    };
    finds_in_file("crates/dist-algos/src/a.rs", &text(5), "crates/dist-algos", "5.0 of 1,000 words");
    finds_nothing("crates/dist-algos/src/a.rs", &text(3));
}

#[test]
fn the_report_on_words_has_a_line_per_crate_and_comments_that_the_seed_decides() {
    let mut tree = sound();
    for number in 0..100 {
        let text = format!("//! The comment of the file with the number {number}.\n");
        tree.file_with(&format!("crates/dist-algos/src/a{number}.rs"), &text);
    }
    let report = |seed| super::words::Words::read(&tree).report(seed);
    assert!(report(1).lines().any(|line| line.trim_start().starts_with("dist-algos")), "{}", report(1));
    assert_eq!(report(1).matches("The comment of the file").count(), 10);
    assert_eq!(report(1), report(1));
    assert_ne!(report(1), report(2));
}

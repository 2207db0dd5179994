//! A check that docs/book/src/distctl-output.md documents the fields of lines.

use serde_json::Value;

/// Asserts that the section whose heading begins with `command` names each field of a line.
#[track_caller]
pub(super) fn check(command: &str, line: &Value) {
    let page = include_str!("../../../../docs/book/src/distctl-output.md");
    let section = page.split("\n## ").find(|section| section.starts_with(command));
    let section = section.unwrap_or_else(|| panic!("distctl-output.md has no section {command}"));
    for field in line.as_object().unwrap().keys() {
        assert!(
            section.contains(&format!("`{field}`")),
            "distctl-output.md does not have {field} of {command}"
        );
    }
}

//! The default members of the workspace, and which of their features a plain build can have.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::command::{Failure, cargo, output};

/// Returns `--features A,B…` with all features of all default members, except those that pull in a member that is not
/// a default member. Unlike `--workspace --all-features`, this builds default members only.
pub(crate) fn all_features() -> Result<String, Failure> {
    let metadata = output(&mut cargo("metadata --no-deps --format-version 1"))?;
    let metadata: Value = serde_json::from_str(&metadata).map_err(std::io::Error::from)?;
    Ok(format!("--features {}", Members::new(&metadata).features().join(",")))
}

/// The packages of the workspace by name.
#[derive(Debug)]
struct Members(BTreeMap<String, Member>);

#[derive(Debug)]
struct Member {
    is_default: bool,
    features: BTreeMap<String, Vec<String>>,
    dependencies: Vec<Dependency>,
}

/// A dependency on another member.
#[derive(Debug)]
struct Dependency {
    /// The name of its package.
    package: String,
    /// Its name in the manifest.
    key: String,
    features: Vec<String>,
}

impl Members {
    /// Reads what `cargo metadata --no-deps` prints.
    fn new(metadata: &Value) -> Self {
        let defaults = strings(&metadata["workspace_default_members"]);
        let names: BTreeSet<_> =
            list(&metadata["packages"]).iter().map(|package| text(&package["name"])).collect();
        let member = |package: &Value| {
            let dependencies = list(&package["dependencies"]).iter();
            let member = Member {
                is_default: defaults.contains(&text(&package["id"])),
                features: features(&package["features"]),
                dependencies: dependencies
                    .filter(|dependency| names.contains(&text(&dependency["name"])))
                    .map(Dependency::new)
                    .collect(),
            };
            (text(&package["name"]), member)
        };
        Self(list(&metadata["packages"]).iter().map(member).collect())
    }

    /// Returns the features that a plain build can have, as `PACKAGE/FEATURE`.
    fn features(&self) -> Vec<String> {
        let defaults = self.0.iter().filter(|(_, member)| member.is_default);
        let all =
            defaults.flat_map(|(name, member)| member.features.keys().map(move |feature| (name, feature)));
        all.filter(|(name, feature)| !self.leaves_defaults(name, feature, &mut BTreeSet::new()))
            .map(|(name, feature)| format!("{name}/{feature}"))
            .collect()
    }

    /// Returns `true` if the feature of this package pulls in a member that is not a default member.
    fn leaves_defaults(&self, package: &str, feature: &str, seen: &mut BTreeSet<(String, String)>) -> bool {
        let Some(member) = self.0.get(package) else { return false };
        if !seen.insert((package.to_owned(), feature.to_owned())) {
            return false;
        }
        let parts = member.features.get(feature).into_iter().flatten();
        parts.into_iter().any(|part| match (part.strip_prefix("dep:"), part.split_once('/')) {
            (Some(key), _) => member.named(key).any(|dependency| self.dependency_leaves(dependency, seen)),
            (None, Some((key, feature))) => {
                let is_weak = key.ends_with('?');
                member.named(key.trim_end_matches('?')).any(|dependency| {
                    !is_weak && self.dependency_leaves(dependency, seen)
                        || self.leaves_defaults(&dependency.package, feature, seen)
                })
            }
            (None, None) => self.leaves_defaults(package, part, seen),
        })
    }

    fn dependency_leaves(&self, dependency: &Dependency, seen: &mut BTreeSet<(String, String)>) -> bool {
        self.0.get(&dependency.package).is_some_and(|member| !member.is_default)
            || dependency
                .features
                .iter()
                .any(|feature| self.leaves_defaults(&dependency.package, feature, seen))
    }
}

impl Member {
    fn named<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a Dependency> {
        self.dependencies.iter().filter(move |dependency| dependency.key == key)
    }
}

impl Dependency {
    fn new(value: &Value) -> Self {
        let package = text(&value["name"]);
        let key = value["rename"].as_str().map_or_else(|| package.clone(), str::to_owned);
        let mut features = strings(&value["features"]);
        if value["uses_default_features"].as_bool() == Some(true) {
            features.push("default".to_owned());
        }
        Self { package, key, features }
    }
}

fn features(value: &Value) -> BTreeMap<String, Vec<String>> {
    let features = value.as_object().into_iter().flatten();
    features.map(|(name, parts)| (name.clone(), strings(parts))).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn strings(value: &Value) -> Vec<String> {
    list(value).iter().map(text).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the features of a crate `top` above the crates `middle` and `heavy`. Only `heavy` is not a
    /// default member.
    fn features_of(top: &Value, middle: &Value) -> Vec<String> {
        let dependency = |name: &str| json!({ "name": name, "rename": null, "features": [], "uses_default_features": false });
        let renamed =
            json!({ "name": "heavy", "rename": "weight", "features": [], "uses_default_features": false });
        let metadata = json!({
            "workspace_default_members": ["top#1", "middle#1"],
            "packages": [
                { "name": "top", "id": "top#1", "features": top, "dependencies": [
                    dependency("middle"), renamed, dependency("serde"),
                ] },
                { "name": "middle", "id": "middle#1", "features": middle, "dependencies": [dependency("heavy")] },
                { "name": "heavy", "id": "heavy#1", "features": { "extra": [] }, "dependencies": [] },
            ],
        });
        Members::new(&metadata).features()
    }

    #[test]
    fn features_that_stay_among_default_members_are_kept() {
        let top = json!({ "default": ["plain"], "plain": ["dep:serde", "middle/plain"], "weak": ["weight?/extra"] });
        let middle = json!({ "plain": [] });
        assert_eq!(features_of(&top, &middle), ["middle/plain", "top/default", "top/plain", "top/weak"]);
    }

    #[test]
    fn features_that_pull_in_another_member_are_left_out() {
        for parts in [&["dep:weight"][..], &["weight/extra"], &["other"], &["middle/burn"]] {
            let top = json!({ "heavy": parts, "other": ["dep:weight"], "plain": [] });
            let middle = json!({ "burn": ["dep:heavy"] });
            assert_eq!(features_of(&top, &middle), ["top/plain"], "{parts:?}");
        }
    }

    #[test]
    fn features_that_name_each_other_are_followed_once() {
        let top = json!({ "a": ["b"], "b": ["a"] });
        assert_eq!(features_of(&top, &json!({})), ["top/a", "top/b"]);
    }
}

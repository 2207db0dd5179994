//! The manifests of the guide's page "On a cluster": valid by the published schema of Kubernetes, and a job whose pods find
//! each other.

use std::collections::BTreeMap;
use std::fs;

use rstest::rstest;
use serde::Deserialize;
use serde_json::Value;

use super::launchers::{Desk, PAGE, all_places, be_a_rank, ended, own_address, places};

/// The definitions of Kubernetes that the manifests use.
const SCHEMA: &str = include_str!("kubernetes-1.37.json");

/// Checks a value by a JSON Schema that has only the keywords of Kubernetes. Adds every contradiction to `wrong`, with
/// the place of the value.
fn check(definitions: &Value, schema: &Value, value: &Value, place: &str, wrong: &mut Vec<String>) {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.strip_prefix("#/$defs/").unwrap();
        let found = definitions.get(name).unwrap_or_else(|| panic!("{name} is not defined"));
        return check(definitions, found, value, place, wrong);
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().map(|kind| kind.as_str().unwrap()).collect(),
        _ => return,
    };
    let (kind, members): (_, Vec<(String, &Value, &Value)>) = match value {
        Value::Null => ("null", Vec::new()),
        Value::Bool(_) => ("boolean", Vec::new()),
        Value::Number(number) => (if number.is_f64() { "number" } else { "integer" }, Vec::new()),
        Value::String(_) => ("string", Vec::new()),
        Value::Array(items) => {
            let member = |(index, item)| (format!("{place}[{index}]"), &schema["items"], item);
            ("array", items.iter().enumerate().map(member).collect())
        }
        Value::Object(fields) => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let missing = required.filter(|name| !fields.contains_key(*name));
            wrong.extend(missing.map(|name| format!("{place} has no {name}")));
            let member = |(name, field)| {
                let known = schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
                (format!("{place}.{name}"), known, field)
            };
            ("object", fields.iter().map(member).collect())
        }
    };
    if !kinds.contains(&kind) {
        wrong.push(format!("{place} is a value of type {kind}, and not {}", kinds.join(" or ")));
    }
    if schema["enum"].as_array().is_some_and(|allowed| !allowed.contains(value)) {
        wrong.push(format!("{place} is {value}, and not one of {}", schema["enum"]));
    }
    for (place, schema, value) in members {
        match schema {
            Value::Bool(false) => wrong.push(format!("{place} is not known")),
            schema => check(definitions, schema, value, &place, wrong),
        }
    }
}

/// Checks a manifest by the definition of its kind.
fn contradictions(manifest: &str) -> Vec<String> {
    let (schema, value): (Value, Value) =
        (serde_json::from_str(SCHEMA).unwrap(), serde_yaml_ng::from_str(manifest).unwrap());
    let kind = match value["kind"].as_str().unwrap() {
        "Service" => "io.k8s.api.core.v1.Service",
        "Job" => "io.k8s.api.batch.v1.Job",
        other => panic!("{other} is not among the definitions"),
    };
    let (definitions, mut wrong) = (&schema["$defs"], Vec::new());
    check(definitions, &definitions[kind], &value, "", &mut wrong);
    wrong
}

#[test]
fn the_manifests_are_valid_by_the_schema_of_kubernetes() {
    for manifest in texts() {
        assert_eq!(contradictions(manifest), [""; 0], "{manifest}");
    }
}

#[rstest]
#[case::a_wrong_type(
    "completions: 4",
    "completions: four",
    ".spec.completions is a value of type string, and not integer or null"
)]
#[case::an_unknown_field("subdomain:", "subDomain:", ".spec.template.spec.subDomain is not known")]
#[case::a_field_of_another_level(
    "backoffLimit: 0",
    "restartPolicy: Never",
    ".spec.restartPolicy is not known"
)]
#[case::a_missing_field(
    "mountPath:",
    "subPath:",
    ".spec.template.spec.containers[0].volumeMounts[0] has no mountPath"
)]
#[case::a_number_for_text(
    "value: \"4\"",
    "value: 4",
    ".spec.template.spec.containers[0].env[1].value is a value of type integer, and not string or null"
)]
#[case::another_version("batch/v1", "batch/v2", ".apiVersion is \"batch/v2\", and not one of [\"batch/v1\"]")]
fn a_manifest_that_contradicts_the_schema_is_found(#[case] from: &str, #[case] to: &str, #[case] told: &str) {
    let [_, job] = texts();
    assert!(job.contains(from), "{from}");
    assert_eq!(contradictions(&job.replacen(from, to, 1)), [told]);
}

/// The fields of an Indexed Job that the page uses.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Job {
    api_version: String,
    kind: String,
    metadata: Name,
    spec: JobSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct JobSpec {
    completion_mode: String,
    completions: usize,
    parallelism: usize,
    backoff_limit: usize,
    template: Template,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Template {
    spec: Pod,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Pod {
    subdomain: String,
    restart_policy: String,
    #[serde(rename = "securityContext")]
    _security: BTreeMap<String, u64>,
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Container {
    #[serde(rename = "name")]
    _name: String,
    #[serde(rename = "image")]
    _image: String,
    command: Vec<String>,
    args: Vec<String>,
    env: Vec<Variable>,
    volume_mounts: Vec<Mount>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Variable {
    name: String,
    value: Option<String>,
    value_from: Option<Source>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Source {
    field_ref: Field,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Field {
    field_path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Mount {
    name: String,
    mount_path: String,
    #[serde(rename = "readOnly")]
    _read_only: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Volume {
    name: String,
    secret: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Name {
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Service {
    api_version: String,
    kind: String,
    metadata: Name,
    spec: ServiceSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ServiceSpec {
    #[serde(rename = "clusterIP")]
    cluster_ip: String,
    publish_not_ready_addresses: bool,
    selector: BTreeMap<String, String>,
}

/// Returns the manifests of the page: a Service and a Job.
fn texts() -> [&'static str; 2] {
    let block = PAGE.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    block.split_once("---\n").unwrap().into()
}

fn manifests() -> (Service, Job) {
    let [service, job] = texts();
    (serde_yaml_ng::from_str(service).unwrap(), serde_yaml_ng::from_str(job).unwrap())
}

#[test]
fn the_service_selects_the_pods_of_the_job_for_kubernetes() {
    let (service, job) = manifests();
    assert_eq!((service.api_version.as_str(), service.kind.as_str()), ("v1", "Service"));
    assert_eq!((job.api_version.as_str(), job.kind.as_str()), ("batch/v1", "Job"));
    assert_eq!((job.spec.completion_mode.as_str(), job.spec.backoff_limit), ("Indexed", 0));
    assert_eq!(job.spec.completions, job.spec.parallelism);
    // The name of the first pod must resolve before the pod is ready.
    assert_eq!(service.spec.cluster_ip, "None");
    assert!(service.spec.publish_not_ready_addresses);
    assert_eq!(service.spec.selector["job-name"], job.metadata.name);
    let pod = &job.spec.template.spec;
    assert_eq!((&pod.subdomain, pod.restart_policy.as_str()), (&service.metadata.name, "Never"));
    assert_eq!(pod.containers[0].volume_mounts[0].name, pod.volumes[0].name);
    assert!(PAGE.contains(&format!("create secret generic {} ", pod.volumes[0].secret["secretName"])));
    let address = pod.containers[0].env.iter().find(|variable| variable.name == "MASTER_ADDR").unwrap();
    let first = format!("{}-0.{}", job.metadata.name, service.metadata.name);
    assert_eq!(address.value.as_deref(), Some(first.as_str()));
}

/// Runs each container's command as the pods would, with its variables and the mounted secret.
#[test]
fn the_pods_of_the_job_for_kubernetes_find_each_other() {
    if be_a_rank().is_some() {
        return;
    }
    let (_, job) = manifests();
    let [container] = &job.spec.template.spec.containers[..] else { panic!("one container") };
    let desk = Desk::new();
    let address = own_address();
    let pods = (0..job.spec.completions).map(|index| {
        let own = desk.0.path().join(format!("pod-{index}"));
        let mounted = own.join("secret");
        fs::create_dir_all(&mounted).unwrap();
        fs::copy(desk.0.path().join(".dist-secret"), mounted.join("secret")).unwrap();
        let here = |text: &str| {
            let text = text.replace(
                &format!("{}/", container.volume_mounts[0].mount_path),
                &format!("{}/", mounted.display()),
            );
            text.replace("/tmp/secret", &own.join("own-secret").display().to_string())
        };
        assert_eq!(container.command, ["/bin/sh", "-c"]);
        let mut command = desk.shell(&here(&container.args[0]));
        for Variable { name, value, value_from } in &container.env {
            let value = value.clone().or_else(|| {
                Some(match value_from.as_ref()?.field_ref.field_path.as_str() {
                    "metadata.annotations['batch.kubernetes.io/job-completion-index']" => index.to_string(),
                    "metadata.name" => format!("train-{index}-x7k2p"),
                    other => panic!("{other} is not a field of a pod"),
                })
            });
            let value = value.unwrap();
            let value = if name == "MASTER_ADDR" { address.clone() } else { here(&value) };
            command.env(name, value);
        }
        command.spawn().unwrap()
    });
    let outputs = ended(pods.collect());
    let mut found: Vec<String> = outputs.iter().flat_map(|output| places(&output.stdout)).collect();
    found.sort();
    assert_eq!(found, all_places(job.spec.completions), "{outputs:?}");
}

//! The manifests of the guide's page "On a cluster": valid by the published schemas of Kubernetes and of Kubeflow's training
//! operator, and jobs whose pods find each other.

use std::collections::BTreeMap;
use std::fs;
use std::process::Child;

use rstest::rstest;
use serde::Deserialize;
use serde_json::Value;

use super::launchers::{Desk, PAGE, all_places, be_a_rank, ended, own_address, places};

/// The definitions of Kubernetes and of Kubeflow that the manifests use.
const SCHEMAS: [&str; 2] = [include_str!("kubernetes-1.37.json"), include_str!("pytorchjob-1.9.json")];

/// The port of a PyTorchJob that names none.
const PYTORCHJOB_PORT: u16 = 23456;

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
    let value: Value = serde_yaml_ng::from_str(manifest).unwrap();
    let kind = match value["kind"].as_str().unwrap() {
        "Service" => "io.k8s.api.core.v1.Service",
        "Job" => "io.k8s.api.batch.v1.Job",
        "PyTorchJob" => "org.kubeflow.v1.PyTorchJob",
        other => panic!("{other} is not among the definitions"),
    };
    let schemas = SCHEMAS.map(|schema| serde_json::from_str::<Value>(schema).unwrap());
    let all = schemas.iter().flat_map(|schema| schema["$defs"].as_object().unwrap().clone());
    let definitions = Value::Object(all.collect());
    let mut wrong = Vec::new();
    check(&definitions, &definitions[kind], &value, "", &mut wrong);
    wrong
}

#[test]
fn the_manifests_are_valid_by_the_schemas() {
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
    let [_, job, _] = texts();
    assert!(job.contains(from), "{from}");
    assert_eq!(contradictions(&job.replacen(from, to, 1)), [told]);
}

#[rstest]
#[case::a_wrong_type(
    "replicas: 1",
    "replicas: one",
    ".spec.pytorchReplicaSpecs.Master.replicas is a value of type string, and not integer"
)]
#[case::another_replica("Worker:", "Helper:", ".spec.pytorchReplicaSpecs.Helper is not known")]
#[case::another_policy(
    "restartPolicy: Never",
    "restartPolicy: Seldom",
    ".spec.pytorchReplicaSpecs.Master.restartPolicy is \"Seldom\", and not one of \
     [\"Always\",\"OnFailure\",\"Never\",\"ExitCode\"]"
)]
#[case::a_field_of_the_pod(
    "template: *rank",
    "image: train",
    ".spec.pytorchReplicaSpecs.Worker.image is not known"
)]
#[case::another_version(
    "org/v1",
    "org/v2",
    ".apiVersion is \"kubeflow.org/v2\", and not one of [\"kubeflow.org/v1\"]"
)]
fn a_pytorchjob_that_contradicts_the_schema_is_found(
    #[case] from: &str,
    #[case] to: &str,
    #[case] told: &str,
) {
    let [.., job] = texts();
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
    subdomain: Option<String>,
    restart_policy: Option<String>,
    #[serde(rename = "securityContext")]
    _security: BTreeMap<String, u64>,
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Container {
    name: String,
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

/// The fields of a PyTorchJob that the page uses.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PyTorchJob {
    api_version: String,
    kind: String,
    metadata: Name,
    spec: PyTorchJobSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PyTorchJobSpec {
    pytorch_replica_specs: Replicas,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct Replicas {
    master: Replica,
    worker: Replica,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Replica {
    replicas: usize,
    restart_policy: String,
    template: Template,
}

/// Returns the manifests of the page: a Service, a Job and a PyTorchJob.
fn texts() -> [&'static str; 3] {
    let blocks: Vec<_> =
        PAGE.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let [first, pytorch_job] = blocks[..] else { panic!("two blocks") };
    let (service, job) = first.split_once("---\n").unwrap();
    [service, job, pytorch_job]
}

fn manifests() -> (Service, Job, PyTorchJob) {
    let [service, job, pytorch_job] = texts();
    (
        serde_yaml_ng::from_str(service).unwrap(),
        serde_yaml_ng::from_str(job).unwrap(),
        serde_yaml_ng::from_str(pytorch_job).unwrap(),
    )
}

#[test]
fn the_service_selects_the_pods_of_the_job_for_kubernetes() {
    let (service, job, _) = manifests();
    assert_eq!((service.api_version.as_str(), service.kind.as_str()), ("v1", "Service"));
    assert_eq!((job.api_version.as_str(), job.kind.as_str()), ("batch/v1", "Job"));
    assert_eq!((job.spec.completion_mode.as_str(), job.spec.backoff_limit), ("Indexed", 0));
    assert_eq!(job.spec.completions, job.spec.parallelism);
    // The name of the first pod must resolve before the pod is ready.
    assert_eq!(service.spec.cluster_ip, "None");
    assert!(service.spec.publish_not_ready_addresses);
    assert_eq!(service.spec.selector["job-name"], job.metadata.name);
    let pod = &job.spec.template.spec;
    assert_eq!(
        (&pod.subdomain, pod.restart_policy.as_deref()),
        (&Some(service.metadata.name.clone()), Some("Never"))
    );
    check_secret(pod);
    let address = pod.containers[0].env.iter().find(|variable| variable.name == "MASTER_ADDR").unwrap();
    let first = format!("{}-0.{}", job.metadata.name, service.metadata.name);
    assert_eq!(address.value.as_deref(), Some(first.as_str()));
}

#[test]
fn the_pytorchjob_has_one_master_and_leaves_the_variables_of_the_operator_alone() {
    let (_, _, job) = manifests();
    assert_eq!((job.api_version.as_str(), job.kind.as_str()), ("kubeflow.org/v1", "PyTorchJob"));
    assert_eq!(job.metadata.name, "train");
    let Replicas { master, worker } = &job.spec.pytorch_replica_specs;
    assert_eq!(master.replicas, 1);
    for replica in [master, worker] {
        assert_eq!(replica.restart_policy, "Never");
        let pod = &replica.template.spec;
        check_secret(pod);
        // The operator looks for a container of this name.
        assert_eq!(pod.containers[0].name, "pytorch");
        let names: Vec<_> = pod.containers[0].env.iter().map(|variable| variable.name.as_str()).collect();
        assert_eq!(names, ["DIST_SECRET_FILE", "DIST_HOST_ID"]);
    }
}

/// Checks that a pod mounts the secret that the page's command creates.
fn check_secret(pod: &Pod) {
    assert_eq!(pod.containers[0].volume_mounts[0].name, pod.volumes[0].name);
    assert!(PAGE.contains(&format!("create secret generic {} ", pod.volumes[0].secret["secretName"])));
}

/// Starts the command of a pod's container with its variables and the mounted secret. `set` are the variables that an
/// operator adds.
fn start_pod(desk: &Desk, pod: &Pod, index: usize, name: &str, set: &[(&str, String)]) -> Child {
    let [container] = &pod.containers[..] else { panic!("one container") };
    let own = desk.0.path().join(name);
    let mounted = own.join("secret");
    fs::create_dir_all(&mounted).unwrap();
    fs::copy(desk.0.path().join(".dist-secret"), mounted.join("secret")).unwrap();
    let here = |text: &str| {
        let mount = format!("{}/", container.volume_mounts[0].mount_path);
        let text = text.replace(&mount, &format!("{}/", mounted.display()));
        text.replace("/tmp/secret", &own.join("own-secret").display().to_string())
    };
    assert_eq!(container.command, ["/bin/sh", "-c"]);
    let mut command = desk.shell(&here(&container.args[0]));
    for variable in &container.env {
        let value = variable.value.clone().or_else(|| {
            Some(match variable.value_from.as_ref()?.field_ref.field_path.as_str() {
                "metadata.annotations['batch.kubernetes.io/job-completion-index']" => index.to_string(),
                "metadata.name" => name.to_owned(),
                other => panic!("{other} is not a field of a pod"),
            })
        });
        command.env(&variable.name, here(&value.unwrap()));
    }
    command.envs(set.iter().map(|(name, value)| (name, value))).spawn().unwrap()
}

/// Checks that these pods were the ranks of one job.
fn check_ranks(pods: Vec<Child>) {
    let world_size = pods.len();
    let outputs = ended(pods);
    let mut found: Vec<String> = outputs.iter().flat_map(|output| places(&output.stdout)).collect();
    found.sort();
    assert_eq!(found, all_places(world_size), "{outputs:?}");
}

#[test]
fn the_pods_of_the_job_for_kubernetes_find_each_other() {
    if be_a_rank().is_some() {
        return;
    }
    let (_, job, _) = manifests();
    let desk = Desk::new();
    // The first pod's name does not resolve here.
    let set = [("MASTER_ADDR", own_address())];
    let pods = (0..job.spec.completions)
        .map(|index| start_pod(&desk, &job.spec.template.spec, index, &format!("train-{index}-x7k2p"), &set));
    check_ranks(pods.collect());
}

#[test]
fn the_pods_of_the_pytorchjob_find_each_other() {
    if be_a_rank().is_some() {
        return;
    }
    let (_, _, job) = manifests();
    let Replicas { master, worker } = &job.spec.pytorch_replica_specs;
    let (desk, address) = (Desk::new(), own_address());
    let world_size = master.replicas + worker.replicas;
    let start = |(replica, kind, index): (&Replica, &str, usize)| {
        let rank = if kind == "master" { 0 } else { index + 1 };
        let set = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world_size.to_string()),
            ("MASTER_ADDR", address.clone()),
            ("MASTER_PORT", PYTORCHJOB_PORT.to_string()),
            ("PET_NNODES", world_size.to_string()),
            ("PET_NODE_RANK", rank.to_string()),
        ];
        start_pod(&desk, &replica.template.spec, index, &format!("train-{kind}-{index}"), &set)
    };
    let masters = (0..master.replicas).map(|index| (master, "master", index));
    let workers = (0..worker.replicas).map(|index| (worker, "worker", index));
    check_ranks(masters.chain(workers).map(start).collect());
}

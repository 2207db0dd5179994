//! State of the program is saved with a checkpoint, atomically, and comes back on every rank.

use std::fs;
use std::path::Path;

use half::f16;
use rstest::rstest;
use serde::{Deserialize, Serialize};

use super::holder::{DIVISIONS, ModelDivision};
use super::{load, on_ranks, same_fault, save};
use crate::checkpoint::{CheckpointProblem, Checkpoints, Saving};
use crate::{Error, Values};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct DataPosition {
    epoch: u64,
    file: String,
    /// The best loss so far, and the bits of a number that decimal digits would change.
    best: [f64; 2],
}

fn position(epoch: u64) -> DataPosition {
    DataPosition {
        epoch,
        file: "shard-07".to_owned(),
        best: [f64::INFINITY, f64::from_bits(0x3fd5_5555_5555_5557)],
    }
}

fn average() -> [f16; 3] {
    [1.5, -0.0, f32::NAN].map(f16::from_f32)
}

fn set(checkpoints: &mut Checkpoints, epoch: u64) {
    checkpoints.set_state("position", &position(epoch)).unwrap();
    checkpoints.set_state_bytes("raw", [1, 2, 255]).unwrap();
    checkpoints.set_state_tensor("average of scale", &[3, 1], Values::F16(&average())).unwrap();
}

/// Saves state of epoch 4 on three ranks.
fn saved(directory: &Path) {
    let directory = directory.to_owned();
    on_ranks(3, ModelDivision::Even, move |holder| {
        holder.fill(1);
        let mut checkpoints = Checkpoints::at(&directory);
        set(&mut checkpoints, 4);
        save(&mut checkpoints, holder, 1).unwrap();
    });
}

#[rstest]
fn state_comes_back_on_any_number_of_ranks(
    #[values(1, 2, 5)] ranks: usize,
    #[values(0, 1, 2, 3, 4)] division: usize,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path());
    let path = directory.path().to_owned();
    on_ranks(ranks, DIVISIONS[division], move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        checkpoints.set_state("of no checkpoint", &1).unwrap();
        assert_eq!(load(&mut checkpoints, holder).unwrap(), Some(1));
        assert_eq!(checkpoints.state::<DataPosition>("position").unwrap(), position(4));
        assert_eq!(checkpoints.state_bytes("raw").unwrap(), [1, 2, 255]);
        let (shape, values) = checkpoints.state_tensor("average of scale").unwrap();
        assert_eq!((shape, values.as_bytes()), (&[3, 1][..], Values::F16(&average()).as_bytes()));
        let Err(Error::Checkpoint(gone)) = checkpoints.state::<u64>("of no checkpoint") else {
            panic!("a load replaces all state")
        };
        assert_eq!(
            (gone.tensor.as_deref(), gone.problem),
            (Some("of no checkpoint"), CheckpointProblem::NoState)
        );
        // It is saved again, except for what is removed.
        assert!(checkpoints.remove_state("raw") && !checkpoints.remove_state("raw"));
        save(&mut checkpoints, holder, 2).unwrap();
        load(&mut checkpoints, holder).unwrap();
        assert_eq!(checkpoints.state::<DataPosition>("position").unwrap(), position(4));
        assert!(checkpoints.state_bytes("raw").is_err());
    });
}

#[test]
fn state_of_another_form_is_an_error_that_names_both_forms() {
    let mut checkpoints = Checkpoints::at("unused");
    set(&mut checkpoints, 1);
    let problem = |error: Error| match error {
        Error::Checkpoint(error) => error.to_string(),
        other => panic!("{other}"),
    };
    let errors = [
        problem(checkpoints.state::<Vec<u64>>("position").unwrap_err()),
        problem(checkpoints.state::<u64>("average of scale").unwrap_err()),
        problem(checkpoints.state_tensor("raw").map(drop).unwrap_err()),
        problem(checkpoints.set_state_tensor("bad", &[2], Values::F32(&[1.0])).unwrap_err()),
        problem(checkpoints.set_state("__metadata__", &1).unwrap_err()),
    ];
    let expected = [
        "tensor position: the state is not alloc::vec::Vec<u64>: ",
        "tensor average of scale: the state is not a value or bytes: a tensor [3, 1] f16",
        "tensor raw: the state is not a tensor: a value or bytes, 3 bytes long",
        "tensor bad: 1 values do not match the shape [2]",
        "tensor __metadata__: the file format uses this name itself",
    ];
    for (error, expected) in errors.iter().zip(expected) {
        assert!(error.contains(expected), "{error}");
    }
}

/// Each rank would otherwise continue from the state of rank 0.
#[rstest]
#[case::value(|rank, checkpoints: &mut Checkpoints| set(checkpoints, u64::from(rank == 1)), "tensor position, on rank 0: ranks 0 and 1 have set different values of this state")]
#[case::length(|rank, checkpoints: &mut Checkpoints| checkpoints.set_state_bytes("raw", vec![0; rank]).unwrap(), "tensor raw, on rank 0: ranks 0 and 1 have set different values of this state")]
#[case::name(|rank, checkpoints: &mut Checkpoints| checkpoints.set_state(["a", "b", "a"][rank], &1).unwrap(), "rank 1 saves step 1 with adamw, with the state b, rank 0 saves step 1 with adamw, with the state a")]
fn state_that_differs_between_ranks_is_an_error_on_all_ranks(
    #[case] set: fn(usize, &mut Checkpoints),
    #[case] expected: &str,
    #[values(false, true)] copied: bool,
) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    let results = on_ranks(3, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        set(holder.comm.rank(), &mut checkpoints);
        let (mut trainer, optimizer) = holder.parts();
        if copied {
            checkpoints.start_save(&mut trainer, Some(optimizer), 1).and_then(Saving::wait)
        } else {
            checkpoints.save(&mut trainer, Some(optimizer), 1)
        }
    });
    let fault = same_fault(results).to_string();
    let expected = if copied { expected.replace("saves", "starts to save") } else { expected.to_owned() };
    assert!(fault.contains(&expected), "{fault}");
    assert!(Checkpoints::at(directory.path()).steps().unwrap().is_empty());
}

#[test]
fn a_started_save_has_the_state_of_its_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    on_ranks(2, ModelDivision::Even, move |holder| {
        let mut checkpoints = Checkpoints::at(&path);
        set(&mut checkpoints, 1);
        let saving = checkpoints.start_save(&mut holder.parts().0, None, 1).unwrap();
        set(&mut checkpoints, 2);
        saving.wait().unwrap();
        checkpoints.load(&mut holder.parts().0, None).unwrap();
        assert_eq!(checkpoints.state::<DataPosition>("position").unwrap(), position(1));
    });
}

#[rstest]
#[case::changed(|file: &Path| { let mut bytes = fs::read(file).unwrap(); *bytes.last_mut().unwrap() ^= 1; fs::write(file, bytes).unwrap(); }, "the checksum differs")]
#[case::shortened(|file: &Path| { let bytes = fs::read(file).unwrap(); fs::write(file, &bytes[1..]).unwrap(); }, "were written")]
#[case::lengthened(|file: &Path| { let bytes = fs::read(file).unwrap(); fs::write(file, [&bytes[..], b"x"].concat()).unwrap(); }, "were written")]
#[case::removed(|file: &Path| fs::remove_file(file).unwrap(), "it does not exist")]
fn damaged_state_is_an_error_on_all_ranks_and_changes_nothing(
    #[case] harm: fn(&Path),
    #[case] expected: &str,
) {
    let directory = tempfile::tempdir().unwrap();
    saved(directory.path());
    harm(&directory.path().join("checkpoint-1-step-1/state.safetensors"));
    let path = directory.path().to_owned();
    let results = on_ranks(2, ModelDivision::Even, move |holder| {
        holder.fill(5);
        let mut checkpoints = Checkpoints::at(&path);
        set(&mut checkpoints, 9);
        let loaded = load(&mut checkpoints, holder);
        assert!(holder.is_of(5, true));
        assert_eq!(checkpoints.state::<DataPosition>("position").unwrap(), position(9));
        loaded
    });
    let fault = same_fault(results).to_string();
    assert!(fault.contains("state.safetensors") && fault.contains(expected), "{fault}");
}

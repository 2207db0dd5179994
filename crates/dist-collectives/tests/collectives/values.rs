//! Values of any serde type.

use std::collections::BTreeMap;

use dist_collectives::values::{VALUE_BYTES_MAX, ValueProblem};
use dist_collectives::{Communicator, Error};
use rstest::rstest;
use serde::{Deserialize, Serialize, Serializer};

use crate::worlds::{self, Network};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shape {
    Point,
    Named { name: String, sides: Vec<f64> },
    Nested(BTreeMap<u8, Option<Self>>),
}

fn shape(rank: usize) -> Shape {
    match rank % 3 {
        0 => Shape::Point,
        1 => Shape::Named { name: "n".repeat(rank * 100), sides: vec![0.5; rank] },
        _ => Shape::Nested(BTreeMap::from([(1, None), (2, Some(shape(rank - 1)))])),
    }
}

#[rstest]
fn values_of_any_size_arrive_as_they_are(
    #[values(Network::Simulated, Network::Threads)] network: Network,
    #[values(1, 2, 3, 5, 8)] world_size: usize,
) {
    worlds::run(network, world_size, |mut comm| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        for root in 0..world_size {
            let value = (rank == root).then(|| shape(root));
            assert_eq!(comm.broadcast_value(value, root).unwrap(), shape(root));
            let gathered = comm.gather_values(&shape(rank), root).unwrap();
            let all: Vec<Shape> = (0..world_size).map(shape).collect();
            assert_eq!(gathered, (rank == root).then(|| all.clone()));
            assert_eq!(comm.all_gather_values(&shape(rank)).unwrap(), all);
            let given = if rank == root { all.as_slice() } else { &[] };
            assert_eq!(comm.scatter_values(given, root).unwrap(), shape(rank));
            // Two of each kind from every rank, including the root.
            comm.send_value(&shape(rank), root).unwrap();
            comm.send_value(&rank, root).unwrap();
            for from in (0..world_size).filter(|_| rank == root) {
                assert_eq!(comm.recv_value::<Shape>(from).unwrap(), shape(from));
                assert_eq!(comm.recv_value::<usize>(from).unwrap(), from);
            }
        }
        comm.broadcast_value(Some(()), 0).unwrap();
    });
}

#[rstest]
fn values_are_started_on_without_waiting(#[values(1, 2, 3, 5)] world_size: usize) {
    worlds::run(Network::Simulated, world_size, |mut comm| {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let (root, all) = (world_size - 1, (0..world_size).map(shape).collect::<Vec<_>>());
        let broadcast = comm.start_broadcast_value((rank == root).then(|| shape(root)), root);
        let gathered = comm.start_gather_values(shape(rank), root);
        let all_gathered = comm.start_all_gather_values(shape(rank));
        assert_eq!(all_gathered.wait().unwrap(), all);
        assert_eq!(gathered.wait().unwrap(), if rank == root { all } else { Vec::new() });
        assert_eq!(broadcast.wait().unwrap(), Some(shape(root)));
        let missing = comm.start_broadcast_value::<Shape>(None, 0).wait().unwrap_err();
        assert!(matches!(*missing.error, Error::Value { problem: ValueProblem::Missing, .. }), "{missing:?}");
    });
}

fn is_zero(level: &u8) -> bool {
    *level == 0
}

/// A type that only a self-describing format can transfer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Attributed {
    #[serde(default, skip_serializing_if = "is_zero")]
    level: u8,
    tags: Vec<u8>,
    #[serde(flatten)]
    rest: BTreeMap<String, Untagged>,
    not_a_number: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Untagged {
    Number(i64),
    Text(String),
    List(Vec<Self>),
}

#[rstest]
#[case::left_out(0)]
#[case::written(3)]
fn attributes_of_serde_are_respected(#[case] level: u8) {
    worlds::run(Network::Simulated, 3, move |mut comm| {
        let list = Untagged::List(vec![Untagged::Number(-1), Untagged::Text("two".to_owned())]);
        let rest = BTreeMap::from([("a".to_owned(), list), ("b".to_owned(), Untagged::Number(1 << 40))]);
        let value = Attributed { level, tags: vec![1, 7], rest, not_a_number: f64::NAN };
        let all = comm.all_gather_values(&value).unwrap();
        let broadcast = comm.broadcast_value(Some(value.clone()), 2).unwrap();
        for mut came in all.into_iter().chain([broadcast]) {
            assert!(came.not_a_number.is_nan());
            came.not_a_number = 0.0;
            assert_eq!(came, Attributed { not_a_number: 0.0, ..value.clone() });
        }
        let json = serde_json::json!({ "any": [1, null, 2.5, { "thing": true }] });
        assert_eq!(comm.gather_values(&json, 1).unwrap(), (comm.rank() == 1).then(|| vec![json; 3]));
    });
}

/// Checks that every rank gets the same error, and that the communicator still works.
#[track_caller]
fn check(problem: ValueProblem, of: usize, program: fn(&mut Communicator) -> Result<(), Error>) {
    worlds::run(Network::Simulated, 3, move |mut comm| {
        let error = program(&mut comm).unwrap_err();
        assert_eq!(error.peer(), Some(of));
        let Error::Value { rank, problem: found, .. } = error else { panic!("{error:?}") };
        assert_eq!((rank, found), (of, problem));
        comm.barrier().unwrap();
    });
}

#[test]
fn a_root_without_a_value_is_everyones_error() {
    check(ValueProblem::Missing, 1, |comm| comm.broadcast_value::<u32>(None, 1).map(drop));
    check(ValueProblem::Missing, 1, |comm| {
        let value = (comm.rank() != 1).then_some(7);
        comm.broadcast_value::<u32>(value, 1).map(drop)
    });
}

/// A type that serde cannot encode on some ranks.
#[derive(Deserialize)]
struct Stubborn(bool);

impl Serialize for Stubborn {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 { Err(serde::ser::Error::custom("no")) } else { self.0.serialize(serializer) }
    }
}

#[test]
fn a_value_that_cannot_be_encoded_is_everyones_error() {
    check(ValueProblem::NotEncodable, 2, |comm| {
        comm.broadcast_value((comm.rank() == 2).then_some(Stubborn(true)), 2).map(drop)
    });
    check(ValueProblem::NotEncodable, 1, |comm| comm.gather_values(&Stubborn(comm.rank() >= 1), 0).map(drop));
    check(ValueProblem::NotEncodable, 0, |comm| {
        comm.all_gather_values(&Stubborn(comm.rank() != 1)).map(drop)
    });
}

#[test]
fn values_that_cannot_be_scattered_are_everyones_error() {
    check(ValueProblem::NotEncodable, 0, |comm| {
        comm.scatter_values(&[Stubborn(false), Stubborn(true), Stubborn(false)], 0).map(drop)
    });
    check(ValueProblem::Missing, 1, |comm| comm.scatter_values(&["one of three".to_owned()], 1).map(drop));
    worlds::run(Network::Simulated, 2, |mut comm| {
        let error = comm.scatter_values(&[1, 2, 3], 0).unwrap_err();
        match comm.rank() {
            0 => assert_eq!(
                error.to_string(),
                "scatter: 3 counts were given for 2 ranks: give one for each rank"
            ),
            _ => assert_eq!(error.to_string(), "the value of rank 0 is missing"),
        }
        assert_eq!(comm.scatter_values(&[1, 2], 0).unwrap(), comm.rank() + 1);
    });
}

#[test]
fn a_value_that_cannot_be_sent_is_the_error_of_both() {
    worlds::run(Network::Simulated, 3, |mut comm| {
        let error = match comm.rank() {
            1 => comm.send_value(&Stubborn(true), 2).unwrap_err(),
            2 => comm.recv_value::<u8>(1).unwrap_err(),
            _ => return,
        };
        assert_eq!(error.to_string(), "the value of rank 1 cannot be encoded");
        match comm.rank() {
            1 => comm.send_value(&"seven", 2).unwrap(),
            _ => {
                let error = comm.recv_value::<u8>(1).unwrap_err();
                let told = matches!(error, Error::Value { rank: 1, problem: ValueProblem::NotDecodable, .. });
                assert!(told, "{error:?}");
            }
        }
    });
}

#[test]
fn the_rank_that_could_not_encode_knows_why() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        let value = Stubborn(comm.rank() == 1);
        let error = comm.all_gather_values(&value).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "the value of rank 1 cannot be encoded");
        assert_eq!(std::error::Error::source(&error).is_some(), comm.rank() == 1);
    });
}

#[test]
fn bytes_of_another_type_are_not_decoded_as_a_value() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        // The encoding is longer than a number, or empty.
        let error = match comm.rank() {
            0 => return drop(comm.broadcast_value(Some("seven".to_owned()), 0).unwrap()),
            _ => comm.broadcast_value::<u8>(None, 0).unwrap_err(),
        };
        let told = matches!(error, Error::Value { rank: 0, problem: ValueProblem::NotDecodable, .. });
        assert!(told, "{error:?}");
        assert_eq!(error.to_string(), "the value of rank 0 cannot be decoded as the type that is expected");
    });
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_memory_is_taken() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        // A peer announces more bytes than possible.
        let announced = VALUE_BYTES_MAX as u64 + 1;
        if comm.rank() == 0 {
            return comm.broadcast(&mut [announced], 0).unwrap();
        }
        let error = comm.broadcast_value::<u8>(None, 0).unwrap_err();
        assert!(matches!(error, Error::Value { rank: 0, problem: ValueProblem::TooLong, .. }), "{error:?}");
    });
}

#[test]
fn a_root_that_does_not_exist_is_refused() {
    worlds::run(Network::Simulated, 2, |mut comm| {
        assert!(matches!(comm.broadcast_value(Some(1), 2), Err(Error::RootOutOfRange { .. })));
        assert!(matches!(comm.gather_values(&1, 2), Err(Error::RootOutOfRange { .. })));
        assert_eq!(comm.traffic().messages_sent, 0);
    });
}

//! Messages and parts whose lengths the receiver does not know.

use dist_collectives::{Communicator, Error};
use rstest::rstest;

use crate::worlds::{self, Network};

/// Returns the elements that `from` sends to `to`: between none and many.
fn elements(from: usize, to: usize) -> Vec<u32> {
    let len = [0, 1, 17, 30_000][(from + 3 * to) % 4] + from;
    let len = if (from + 3 * to).is_multiple_of(4) { 0 } else { len };
    (0..len).map(|index| u32::try_from(1_000_000 * from + 100_000 * to + index).unwrap()).collect()
}

#[rstest]
fn parts_of_unknown_lengths_arrive_as_they_were_sent(#[values(1, 2, 3, 4, 7)] world_size: usize) {
    for &network in Network::ALL {
        worlds::run(network, world_size, move |mut comm| {
            let rank = comm.rank();
            let to_root: Vec<_> = (0..world_size).map(|from| elements(from, 0)).collect();
            assert_eq!(comm.all_gather_vec(&elements(rank, 0)).unwrap(), to_root, "{network:?}");
            let gathered = comm.gather_vec(&elements(rank, 0), world_size - 1).unwrap();
            assert_eq!(gathered, (rank == world_size - 1).then_some(to_root), "{network:?}");
            let sent: Vec<_> = (0..world_size).map(|to| elements(rank, to)).collect();
            let expected: Vec<_> = (0..world_size).map(|from| elements(from, rank)).collect();
            assert_eq!(comm.all_to_all_vec(&sent).unwrap(), expected, "{network:?}");
        });
    }
}

#[rstest]
fn a_message_of_unknown_length_is_received_whether_it_is_kept_or_awaited(
    #[values(0, 1, 300_000)] len: usize,
) {
    for &network in Network::ALL {
        worlds::run(network, 2, move |mut comm| {
            let sent: Vec<f64> = (0_u32..).take(len).map(f64::from).collect();
            if comm.rank() == 0 {
                comm.with_tag(1).send(&sent, 1).unwrap();
                comm.with_tag(2).send(&sent, 1).unwrap();
                return;
            }
            assert_eq!(comm.with_tag(2).recv_vec::<f64>(0).unwrap(), sent, "{network:?}");
            assert_eq!(comm.with_tag(1).recv_vec::<f64>(0).unwrap(), sent, "{network:?}");
        });
    }
}

#[test]
fn a_message_of_unknown_length_must_have_the_awaited_type() {
    let errors = worlds::run(Network::Simulated, 2, |mut comm| {
        if comm.rank() == 0 {
            comm.send(&[1_u8; 4], 1).unwrap();
            return comm.barrier().unwrap_err();
        }
        comm.recv_vec::<u32>(0).unwrap_err()
    });
    assert!(matches!(errors[1], Error::Mismatch { peer: 0, .. }), "{:?}", errors[1]);
    assert!(
        errors[1].to_string().starts_with("types differ: rank 0 has u8, this rank has u32"),
        "{}",
        errors[1]
    );
}

#[test]
fn lists_that_are_not_one_for_each_rank_are_refused_before_anything_is_sent() {
    worlds::run(Network::Simulated, 2, |mut comm: Communicator| {
        let error = comm.all_to_all_vec(&[vec![1_u8]]).unwrap_err();
        assert!(matches!(error, Error::Counts { counts: 1, world_size: 2, .. }), "{error:?}");
        assert_eq!(comm.traffic().messages_sent, 0);
        comm.barrier().unwrap();
    });
}

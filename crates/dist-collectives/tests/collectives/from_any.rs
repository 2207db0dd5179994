//! Receives from any rank, blocking and started: what both promise.

use std::time::Duration;

use dist_collectives::transport::Chain;
use dist_collectives::{Communicator, Error, Pending, Result};
use dist_transport::sim;
use rstest::rstest;

use crate::worlds::{self, Network};

const SECOND: Duration = Duration::from_secs(1);

/// The form of a receive from any rank.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// `recv_any`.
    Blocking,
    /// `start_recv_any`, and a wait for its handle.
    Started,
}

impl Form {
    /// Receives a message of any rank. Returns the sender.
    fn receive(self, comm: &mut Communicator, elements: &mut [u8]) -> Result<usize> {
        match self {
            Self::Blocking => comm.recv_any(elements),
            Self::Started => {
                let received = comm.start_recv_any(elements.to_vec()).wait()?;
                elements.copy_from_slice(&received.elements);
                Ok(received.from.expect("a message has come"))
            }
        }
    }

    /// Receives this number of messages of one byte length. Started receives are all started before the first wait. Returns
    /// the senders in the order of the receives.
    fn receive_all(self, comm: &mut Communicator, count: usize, len: usize) -> Vec<usize> {
        match self {
            Self::Blocking => (0..count).map(|_| comm.recv_any(&mut vec![0_u8; len]).unwrap()).collect(),
            Self::Started => {
                let receives: Vec<_> = (0..count).map(|_| comm.start_recv_any(vec![0_u8; len])).collect();
                let received = Pending::wait_all(receives).into_iter();
                received.map(|message| message.unwrap().from.expect("a message has come")).collect()
            }
        }
    }
}

#[rstest]
fn ranks_take_turns_if_several_have_sent_messages(#[values(Form::Blocking, Form::Started)] form: Form) {
    let senders = worlds::run(Network::Simulated, 3, move |mut comm| {
        if comm.rank() > 0 {
            (0..4).for_each(|_| comm.send(&[1_u8; 8], 0).unwrap());
            comm.barrier().unwrap();
            return Vec::new();
        }
        comm.barrier().unwrap();
        // Receives all messages into the queues of this rank.
        comm.runtime().sleep(SECOND);
        for from in 1..3 {
            assert!(comm.with_tag(1).try_probe(from).unwrap().is_none());
        }
        form.receive_all(&mut comm, 8, 8)
    });
    let turns: Vec<_> = senders[0].windows(2).map(|pair| pair[0] != pair[1]).collect();
    assert_eq!(turns, [true; 7], "{:?}", senders[0]);
}

#[rstest]
fn the_seed_decides_which_message_comes_first(
    #[values(Form::Blocking, Form::Started)] form: Form,
    #[values(false, true)] has_come: bool,
) {
    let first = |seed| {
        let network = sim::Network::new(4).with_seed(seed);
        let run = network.run(move |transport| {
            let mut comm = Communicator::new(transport);
            if comm.rank() > 0 {
                comm.send(&[1_u8], 0).unwrap();
                return None;
            }
            if has_come {
                comm.runtime().sleep(SECOND);
            }
            Some(form.receive_all(&mut comm, 3, 1)[0])
        });
        run.results[0].unwrap()
    };
    let firsts: Vec<_> = (0..30).map(first).collect();
    assert_eq!(firsts, (0..30).map(first).collect::<Vec<_>>());
    assert!((1..4).all(|rank| firsts.contains(&rank)), "{firsts:?}");
}

#[rstest]
fn a_receive_goes_on_without_ranks_that_have_left(
    #[values(Form::Blocking, Form::Started)] form: Form,
    #[values(1, 2)] leaves: usize,
) {
    for &network in Network::ALL {
        worlds::run(network, 3, move |mut comm| {
            if comm.rank() == leaves {
                return;
            }
            if comm.rank() > 0 {
                return (0..3_u8).for_each(|number| comm.send(&[number], 0).unwrap());
            }
            for number in 0..3_u8 {
                let mut received = [9];
                assert_eq!(form.receive(&mut comm, &mut received).unwrap(), 3 - leaves, "{network:?}");
                assert_eq!(received, [number]);
            }
        });
    }
}

#[rstest]
fn a_receive_fails_at_once_if_all_others_have_left(#[values(Form::Blocking, Form::Started)] form: Form) {
    for &network in Network::ALL {
        let mut errors = worlds::run(network, 3, move |mut comm| {
            if comm.rank() > 0 {
                comm.with_tag(u32::try_from(comm.rank()).unwrap()).send(&[1_u8; 3], 0).unwrap();
                return None;
            }
            Some(form.receive(&mut comm.with_tag(7), &mut [0_u8]).unwrap_err())
        });
        let error = errors.swap_remove(0).unwrap();
        assert!(!error.is_timeout(), "{network:?}: {error:?}");
        let expected = "message of 1 u8 (tag 7) from any rank failed; these messages have come instead: \
                        message of 3 u8 (tag 1, from rank 1); message of 3 u8 (tag 2, from rank 2)";
        assert_eq!(error.to_string(), expected, "{network:?}");
    }
}

#[rstest]
fn a_receive_that_times_out_lists_all_ranks_and_blames_none(
    #[values(Form::Blocking, Form::Started)] form: Form,
    #[values(false, true)] is_other_kept: bool,
) {
    for &network in Network::ALL {
        let errors = worlds::run(network, 3, move |mut comm| {
            if comm.rank() == 0 {
                if is_other_kept {
                    // The message with tag 1 has come before this one.
                    comm.with_tag(2).recv(&mut [0_u8], 2).unwrap();
                }
                let mut seven = comm.with_tag(7);
                return form.receive(&mut seven.with_timeout(SECOND / 4), &mut [0_u8]).unwrap_err();
            }
            if comm.rank() == 2 && is_other_kept {
                comm.with_tag(1).send(&[1_u8; 3], 0).unwrap();
                comm.with_tag(2).send(&[2_u8], 0).unwrap();
            }
            comm.barrier().unwrap_err()
        });
        assert!(errors[0].is_timeout() && errors[0].peer().is_none(), "{network:?}: {:?}", errors[0]);
        let mut expected =
            "message of 1 u8 (tag 7) from any rank: none of ranks [1, 2] has sent it within 250ms".to_owned();
        if is_other_kept {
            expected += "; these have come instead: message of 3 u8 (tag 1, from rank 2)";
        }
        assert_eq!(errors[0].to_string(), expected, "{network:?}");
        for error in &errors[1..] {
            assert_eq!(error.peer(), Some(0), "{network:?}: {error:?}");
            let told = Chain(error).to_string();
            let reason = "rank 0 gave up: message of 1 u8 (tag 7) from any rank: none of";
            assert!(told.contains(reason), "{network:?}: {told}");
        }
    }
}

#[rstest]
fn a_message_of_another_length_fails_the_receive_that_it_matches(
    #[values(Form::Blocking, Form::Started)] form: Form,
) {
    for &network in Network::ALL {
        let errors = worlds::run(network, 2, move |mut comm| {
            if comm.rank() == 1 {
                comm.send(&[1_u8; 3], 0).unwrap();
                return comm.barrier().unwrap_err();
            }
            form.receive(&mut comm, &mut [0_u8; 4]).unwrap_err()
        });
        let Error::Mismatch { peer: 1, ours, theirs } = &errors[0] else {
            panic!("{network:?}: {:?}", errors[0])
        };
        assert_eq!((ours.count, theirs.count), (4, 3), "{network:?}");
    }
}

//! Forks and subgroups, each on its own channel.

use std::time::Duration;

use crate::{Abort, Cause, Error, Fingerprint, Rank, Transport};

use super::backend::{Backend, Fabric, LONG};
use super::calls::{
    await_abort, exchange_a_byte_with_all, pass_round, payload, receive, receive_within, send, stand_by,
    wait_in_vain,
};

/// Sends bytes that depend on the channel around the ring, and checks that the received bytes belong to the
/// same channel.
fn pass_own(transport: &mut dyn Transport, salt: usize) {
    let rank = transport.rank();
    for round in 0..20 {
        let received = pass_round(transport, &payload(rank, round + salt, 100)).unwrap();
        assert_eq!(received, payload(rank.left(), round + salt, 100), "channel {salt}, round {round}");
    }
}

/// Messages of different channels never mix.
pub(super) fn messages_of_different_channels_never_mix(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = |mut transport: Box<dyn Transport>| {
            let everybody: Vec<usize> = (0..transport.rank().world_size()).collect();
            let forks: Vec<_> = (0..3).map(|_| transport.fork(&everybody).unwrap().unwrap()).collect();
            let channels: Vec<_> = forks.iter().map(|fork| fork.channel().get()).collect();
            let runtime = transport.runtime().clone();
            let forks = forks.into_iter().enumerate();
            let tasks: Vec<_> = forks
                .map(|(index, mut fork)| {
                    let work = move || pass_own(&mut *fork, 100 * (index + 1));
                    runtime.spawn("fork", work).unwrap()
                })
                .collect();
            pass_own(&mut *transport, 0);
            tasks.into_iter().for_each(|task| task.join().unwrap());
            assert_eq!(transport.traffic().messages_sent, 20);
            [vec![transport.channel().get()], channels].concat()
        };
        backend.check(world_size, program, |channels| {
            assert!(channels.iter().all(|of_rank| *of_rank == channels[0]), "the ranks agree");
            let mut distinct = channels[0].clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), 4);
        });
    }
    for world_size in [1, 2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// A waiting channel does not delay another: rank 0's message is sent while another of its threads waits for
/// the answer to it.
pub(super) fn a_channel_that_waits_does_not_hold_up_another(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let everybody: Vec<usize> = (0..world_size).collect();
            let mut fork = transport.fork(&everybody).unwrap().unwrap();
            match transport.rank().index() {
                0 => {
                    let runtime = transport.runtime().clone();
                    let answer =
                        runtime.spawn("waiting", move || receive(&mut *fork, 1, 3).unwrap()).unwrap();
                    send(&mut *transport, 1, &[1, 2, 3]).unwrap();
                    assert_eq!(answer.join().unwrap(), [1, 2, 3]);
                }
                1 => {
                    let question = receive(&mut *transport, 0, 3).unwrap();
                    send(&mut *fork, 0, &question).unwrap();
                }
                _ => {}
            }
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// A group is numbered in the order of its list, and other ranks get none.
pub(super) fn a_group_is_numbered_in_the_order_of_its_list_and_others_get_none(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize, members: &'static [usize]) {
        let program = move |mut transport: Box<dyn Transport>| {
            let rank = transport.rank();
            let group = transport.fork(members).unwrap();
            if let Some(mut group) = group {
                let left = members[group.rank().left().index()];
                let received = pass_round(&mut *group, &payload(rank, 0, 50)).unwrap();
                assert_eq!(received, payload(Rank::new(left, world_size).unwrap(), 0, 50));
                return Some((group.rank(), group.channel().get()));
            }
            None
        };
        backend.check(world_size, program, |places| {
            let channel = places[members[0]].unwrap().1;
            for (rank, place) in places.into_iter().enumerate() {
                let index = members.iter().position(|&member| member == rank);
                let expected = index.map(|index| (Rank::new(index, members.len()).unwrap(), channel));
                assert_eq!(place, expected, "rank {rank}");
            }
        });
    }
    let cases: &[(usize, &'static [usize])] =
        &[(3, &[2, 0]), (3, &[1]), (5, &[4, 1, 3]), (8, &[0, 2, 4, 6]), (8, &[7, 6, 5, 4, 3, 2, 1, 0])];
    for &(world_size, members) in cases {
        check(backend, world_size, members);
    }
}

/// A group of a group is translated twice.
pub(super) fn a_group_of_a_group_is_translated_twice(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let rank = transport.rank();
        let mut odd = transport.fork(&[7, 5, 3, 1]).unwrap()?;
        let mut ends = odd.fork(&[3, 0]).unwrap()?;
        assert_eq!((odd.members(), ends.members()), (&[7, 5, 3, 1][..], &[1, 7][..]));
        let received = pass_round(&mut *ends, &payload(rank, 0, 50)).unwrap();
        Some((ends.rank().index(), received))
    };
    backend.check(8, program, |places| {
        let bytes = |rank| payload(Rank::new(rank, 8).unwrap(), 0, 50);
        let members = [(1, (0, bytes(7))), (7, (1, bytes(1)))];
        for (rank, place) in places.into_iter().enumerate() {
            let expected = members.iter().find(|(member, _)| *member == rank).map(|(_, place)| place.clone());
            assert_eq!(place, expected, "rank {rank}");
        }
    });
}

/// One call makes several groups that share no rank.
pub(super) fn one_call_makes_several_groups_that_share_no_rank(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let program = |mut transport: Box<dyn Transport>| {
        let rank = transport.rank().index();
        let lists: [&[usize]; 3] = [&[6, 0, 3], &[4, 1], &[5, 2]];
        let own = lists.into_iter().find(|members| members.contains(&rank)).unwrap();
        let mut group = transport.fork(own).unwrap().unwrap();
        let left = own[group.rank().left().index()];
        let received = pass_round(&mut *group, &[u8::try_from(rank).unwrap()]).unwrap();
        assert_eq!(usize::from(received[0]), left);
        // Later numbers are the same everywhere.
        let everybody: Vec<usize> = (0..7).collect();
        let mut all = transport.fork(&everybody).unwrap().unwrap();
        assert_eq!(pass_round(&mut *all, &[5]).unwrap(), [5]);
        group.channel().get()
    };
    backend.check(7, program, |channels| {
        for (rank, first) in [(6, 0), (3, 0), (4, 1), (5, 2)] {
            assert_eq!(channels[rank], channels[first]);
        }
        assert!(channels[0] != channels[1] && channels[1] != channels[2] && channels[0] != channels[2]);
    });
}

/// A list of members that makes no group is refused without harm.
pub(super) fn a_list_of_members_that_makes_no_group_is_refused_without_harm(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            for bad in [vec![], vec![0, 0], vec![world_size - 1, 0, world_size - 1, 0]] {
                let error = transport.fork(&bad).unwrap_err();
                assert!(matches!(&error, Error::Members { members } if *members == bad), "{error}");
            }
            let error = transport.fork(&[0, world_size]).unwrap_err();
            let named = Error::RankOutOfRange { rank: world_size, world_size };
            assert_eq!(error.to_string(), named.to_string());
            let everybody: Vec<usize> = (0..world_size).collect();
            let mut fork = transport.fork(&everybody).unwrap().unwrap();
            assert_eq!(pass_round(&mut *fork, &[5]).unwrap(), [5]);
            assert_eq!(transport.aborted(), None);
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [1, 2, 5] {
        check(backend, world_size);
    }
}

/// An error in a group ends the job, and ranks are named by their numbers in the world.
pub(super) fn an_error_in_a_group_ends_the_job_and_names_ranks_of_the_world(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    let call = Fingerprint([8; Fingerprint::SIZE]);
    let program = move |mut transport: Box<dyn Transport>| {
        let group = transport.fork(&[4, 2]).unwrap();
        let error = match group {
            Some(mut group) if group.rank().index() == 1 => {
                exchange_a_byte_with_all(&mut *group).unwrap();
                group.begin(&call);
                receive_within(&mut *group, 0, 1, backend.short()).unwrap_err()
            }
            Some(mut group) => {
                exchange_a_byte_with_all(&mut *group).unwrap();
                wait_in_vain(&mut *group, 1)
            }
            None => stand_by(&mut *transport, 2),
        };
        (error, await_abort(&*transport))
    };
    let record = Abort { cause: Cause::timed_out(), rank: 4, reporter: 2, call };
    backend.check(5, program, move |ends| {
        for (rank, (error, abort)) in ends.iter().enumerate() {
            assert_eq!(*abort, record, "rank {rank}");
            match error {
                Error::Timeout { peer: 4, .. } if rank == 2 => {}
                Error::Aborted(abort) if rank != 2 => assert_eq!(*abort, record),
                other => panic!("rank {rank}: {other}"),
            }
        }
    });
}

/// A rank may leave if no rank waits for it.
pub(super) fn a_rank_may_leave_if_no_rank_waits_for_it(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, world_size: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            exchange_a_byte_with_all(&mut *transport).unwrap();
            let others: Vec<usize> = (1..world_size).collect();
            let group = transport.fork(&others).unwrap();
            drop(transport);
            if let Some(mut group) = group {
                for _ in 0..10 {
                    pass_round(&mut *group, &[1]).unwrap();
                }
                assert_eq!(group.aborted(), None);
            }
        };
        backend.check(world_size, program, drop);
    }
    for world_size in [2, 3, 5, 8] {
        check(backend, world_size);
    }
}

/// A rank that leaves a group is noticed there although it stays in the job.
pub(super) fn a_rank_that_leaves_a_group_is_noticed_there_although_it_stays_in_the_job(
    fabric: &'static dyn Fabric,
) {
    let backend = Backend(fabric);
    fn check(backend: Backend, leaving: usize, with_its_parent: bool) {
        let program = move |mut transport: Box<dyn Transport>| {
            let mut parent = transport.fork(&[2, 1, 0]).unwrap().unwrap();
            let mut group = parent.fork(&[2, 1, 0]).unwrap().unwrap();
            let error = if transport.rank().index() == leaving {
                drop(group);
                if with_its_parent {
                    drop(parent);
                }
                wait_in_vain(&mut *transport, 1)
            } else {
                receive_within(&mut *group, leaving, 1, LONG).unwrap_err()
            };
            (error, await_abort(&*transport))
        };
        backend.check(3, program, move |ends| {
            for (rank, (error, abort)) in ends.iter().enumerate() {
                assert_eq!((abort.rank, &abort.cause), (leaving, &Cause::Left), "rank {rank}");
                let noticed =
                    matches!(error, Error::Closed { peer, .. } if *peer == leaving && rank != leaving);
                assert!(noticed || matches!(error, Error::Aborted(_)), "rank {rank}: {error}");
            }
        });
    }
    for leaving in [0, 2] {
        for with_its_parent in [false, true] {
            check(backend, leaving, with_its_parent);
        }
    }
}

/// A rank that enters a group late is waited for.
pub(super) fn a_rank_that_comes_late_to_a_group_is_waited_for(fabric: &'static dyn Fabric) {
    let backend = Backend(fabric);
    fn check(backend: Backend, late: usize) {
        let program = move |mut transport: Box<dyn Transport>| {
            let everybody = [1, 0];
            let mut other = transport.fork(&everybody).unwrap().unwrap();
            drop(transport.fork(&everybody).unwrap());
            let runtime = transport.runtime().clone();
            if transport.rank().index() == late {
                // Waits until the other rank has waited long enough to ask.
                let until = runtime.deadline(ASKED);
                while !runtime.expired(until) {
                    runtime.park(Some(until));
                }
            }
            let mut group = transport.fork(&everybody).unwrap().unwrap();
            assert_eq!(pass_round(&mut *group, &[3]).unwrap(), [3]);
            assert_eq!(pass_round(&mut *other, &[4]).unwrap(), [4]);
        };
        backend.check(2, program, drop);
    }
    for late in [0, 1] {
        check(backend, late);
    }
}

/// The time after which a waiting rank has asked for the reason.
const ASKED: Duration = Duration::from_millis(700);

/// Members make groups alone, at different points among their other calls. Equal numbers and lists are one group, and
/// the forks of the parent do not count them.
pub(super) fn members_make_groups_that_other_ranks_do_not_count(fabric: &'static dyn Fabric) {
    let program = |mut transport: Box<dyn Transport>| {
        let me = transport.rank().index();
        let mut forks = Vec::new();
        if me == 1 {
            forks.push(transport.fork(&[0, 1, 2]).unwrap().unwrap());
        }
        let mut groups: Vec<Box<dyn Transport>> = Vec::new();
        if me > 0 {
            // One of the members makes them in another order.
            let mut numbers = [7, u64::MAX];
            numbers.rotate_left(me - 1);
            groups.extend(numbers.map(|number| transport.fork_local(&[2, 1], number).unwrap()));
            groups.rotate_left(me - 1);
        } else {
            let error = transport.fork_local(&[2, 1], 7).unwrap_err();
            assert!(matches!(error, Error::NotAMember { rank: 0, .. }), "{error}");
            let error = transport.fork_local(&[0, 0], 7).unwrap_err();
            assert!(matches!(error, Error::Members { .. }), "{error}");
        }
        if me != 1 {
            forks.push(transport.fork(&[0, 1, 2]).unwrap().unwrap());
        }
        for (index, group) in groups.iter_mut().enumerate() {
            let own = [me, index].map(|number| u8::try_from(number).unwrap());
            let received = pass_round(&mut **group, &own).unwrap();
            assert_eq!(received, [3 - own[0], own[1]]);
        }
        let received = pass_round(&mut *forks[0], &[u8::try_from(me).unwrap()]).unwrap();
        assert_eq!(received, [u8::try_from((me + 2) % 3).unwrap()]);
        groups.iter().map(|group| group.channel().get()).chain([forks[0].channel().get()]).collect::<Vec<_>>()
    };
    Backend(fabric).check(3, program, |channels| {
        assert_eq!(channels[1], channels[2]);
        assert_eq!(channels[0][0], channels[1][2]);
        let distinct: std::collections::HashSet<_> = channels[1].iter().collect();
        assert_eq!(distinct.len(), 3);
    });
}

/// A rank that leaves a group of its members only, before any rank is connected to it there, is noticed.
pub(super) fn a_rank_that_leaves_a_group_of_its_members_only_is_noticed(fabric: &'static dyn Fabric) {
    let program = |mut transport: Box<dyn Transport>| {
        let mut group = transport.fork_local(&[1, 0], 3).unwrap();
        let error = if transport.rank().index() == 1 {
            drop(group);
            wait_in_vain(&mut *transport, 0)
        } else {
            receive_within(&mut *group, 0, 1, LONG).unwrap_err()
        };
        (error, await_abort(&*transport))
    };
    Backend(fabric).check(2, program, |ends| {
        for (rank, (error, abort)) in ends.iter().enumerate() {
            assert_eq!((abort.rank, &abort.cause), (1, &Cause::Left), "rank {rank}");
            assert!(
                matches!(error, Error::Closed { peer: 1, .. } | Error::Aborted(_)),
                "rank {rank}: {error}"
            );
        }
    });
}

//! The key-value store: every rank reaches the same values, and a wait ends in time.

use crate::store::{Comparison, KEY_BYTES_MAX, VALUE_BYTES_MAX};
use crate::{Cause, Store, StoreError, Transport};

use super::backend::{Backend, Fabric, LONG};
use super::rank_result::RankResult;

/// Runs `program` with the store of each rank, and `verify` on the results, in worlds of several sizes.
fn check_with_store<T: RankResult + Send + 'static>(
    fabric: &'static dyn Fabric,
    program: impl Fn(usize, &Store) -> T + Clone + Send + Sync + 'static,
    verify: impl Fn(Vec<T>),
) {
    for world_size in [1, 2, 3, 5] {
        let program = program.clone();
        let program = move |transport: Box<dyn Transport>| {
            let store = transport.store();
            let store = has_store(fabric, store)?;
            Some(program(transport.rank().index(), &store.with_timeout(LONG)))
        };
        Backend(fabric).check(world_size, program, |results| {
            let results: Vec<T> = results.into_iter().flatten().collect();
            if results.len() == world_size {
                verify(results);
            }
        });
    }
}

/// Returns the store if the fabric states that it has one.
fn has_store(fabric: &dyn Fabric, store: Result<Store, StoreError>) -> Option<Store> {
    match store {
        Ok(store) => {
            assert!(fabric.has_store(), "the fabric states that it has no store");
            Some(store)
        }
        Err(StoreError::NoStore) => {
            assert!(!fabric.has_store(), "the fabric states that it has a store");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A rank reads what another one has set, whether it waits before or after, and a removed key is gone.
pub(super) fn values_that_one_rank_sets_reach_all(fabric: &'static dyn Fabric) {
    let program = |rank, store: &Store| {
        assert_eq!(store.get("absent").unwrap(), None);
        let own = format!("of {rank}");
        store.set(&own, b"first").unwrap();
        assert_eq!(store.get(&own).unwrap().unwrap(), b"first");
        assert_eq!(store.remove(&own).unwrap().unwrap(), b"first");
        assert_eq!(store.remove(&own).unwrap(), None);
        if rank == 0 {
            store.set("value", b"that all see").unwrap();
        }
        store.wait("value").unwrap()
    };
    check_with_store(fabric, program, |values| {
        assert!(values.iter().all(|value| value == b"that all see"), "{values:?}");
    });
}

/// Ranks that take indices of a loop from a number in the store take each index once.
pub(super) fn each_sum_is_the_result_of_one_rank_only(fabric: &'static dyn Fabric) {
    const INDICES: i64 = 20;
    let program = |_, store: &Store| {
        let next = || store.add("next", 1).unwrap() - 1;
        std::iter::repeat_with(next).take_while(|&index| index < INDICES).collect::<Vec<_>>()
    };
    check_with_store(fabric, program, |indices| {
        assert!(indices.iter().all(|own| own.is_sorted()), "{indices:?}");
        let mut all = indices.concat();
        all.sort_unstable();
        assert_eq!(all, (0..INDICES).collect::<Vec<_>>());
    });
}

/// If several ranks compare and set at the same time, one succeeds, and the others get its value.
pub(super) fn one_of_several_ranks_comes_first(fabric: &'static dyn Fabric) {
    let program = |rank: usize, store: &Store| {
        let own = rank.to_string().into_bytes();
        let first = match store.compare_and_set("first", None, &own).unwrap() {
            Comparison::Equal => own.clone(),
            Comparison::Different { value } => value.expect("another rank has set it"),
        };
        assert_eq!(
            store.compare_and_set("first", Some(b"no rank"), b"too late").unwrap(),
            Comparison::Different { value: Some(first.clone()) }
        );
        (first == own, first)
    };
    check_with_store(fabric, program, |ends| {
        assert_eq!(ends.iter().filter(|(is_first, _)| *is_first).count(), 1, "{ends:?}");
        assert!(ends.iter().all(|(_, first)| *first == ends[0].1), "{ends:?}");
    });
}

/// Values of every length up to the limit arrive whole. Longer values and keys are refused without harm.
pub(super) fn values_up_to_the_limit_arrive_whole(fabric: &'static dyn Fabric) {
    let program = |rank, store: &Store| {
        let value = |len: usize| (0..=250).cycle().take(len).collect::<Vec<u8>>();
        let key = "k".repeat(KEY_BYTES_MAX - 1) + if rank == 0 { "0" } else { "1" };
        for len in [0, 1, 235, 236, 237, 5000, VALUE_BYTES_MAX] {
            store.set(&key, &value(len)).unwrap();
            let longest = store.compare_and_set(&key, Some(b"other"), &value(len)).unwrap();
            assert!(matches!(longest, Comparison::Different { value: Some(_) }));
            if rank == 0 {
                assert_eq!(store.get(&key).unwrap().unwrap(), value(len));
            }
        }
        let error = store.set(&key, &value(VALUE_BYTES_MAX + 1)).unwrap_err();
        assert!(matches!(error, StoreError::ValueTooLong { .. }), "{error}");
        let error = store.set(&(key + "2"), b"").unwrap_err();
        assert!(matches!(error, StoreError::KeyTooLong { .. }), "{error}");
        store.set("text", b"no number").unwrap();
        let error = store.add("text", 1).unwrap_err();
        assert!(matches!(error, StoreError::NotANumber { len: 9, .. }), "{error}");
    };
    check_with_store(fabric, program, drop);
}

/// A wait for a key that is never set ends at its deadline, names the key, and harms nothing.
pub(super) fn a_wait_for_a_key_ends_at_its_deadline_and_names_the_key(fabric: &'static dyn Fabric) {
    let short = Backend(fabric).short();
    let program = move |rank, store: &Store| {
        let error = store.clone().with_timeout(short).wait("absent").unwrap_err();
        let StoreError::NotSet { key, limit } = &error else { panic!("{error}") };
        assert_eq!((key.as_str(), *limit), ("absent", short));
        assert!(error.is_timeout());
        store.set(&format!("of {rank}"), b"").unwrap();
        (0..=rank).for_each(|other| drop(store.wait(&format!("of {other}")).unwrap()));
    };
    check_with_store(fabric, program, drop);
}

/// The end of the job ends every wait, and every later request fails with the same record.
pub(super) fn an_abort_ends_every_wait_for_a_key(fabric: &'static dyn Fabric) {
    for world_size in [2, 3] {
        let program = move |mut transport: Box<dyn Transport>| {
            let store = has_store(fabric, transport.store())?.with_timeout(LONG);
            if transport.rank().index() == 0 {
                // The others wait for the key, or are about to.
                (1..world_size).for_each(|rank| drop(store.wait(&format!("ready {rank}")).unwrap()));
                transport.abort(Cause::gave_up("enough"));
            } else {
                // The abort may overtake the reply.
                let set = store.set(&format!("ready {}", transport.rank().index()), b"");
                assert!(matches!(set, Ok(()) | Err(StoreError::Aborted(_))), "{set:?}");
            }
            let aborts = [store.wait("absent"), store.wait("absent")].map(|ended| match ended.unwrap_err() {
                StoreError::Aborted(abort) => abort,
                other => panic!("{other}"),
            });
            Some(aborts)
        };
        Backend(fabric).check(world_size, program, |aborts| {
            for abort in aborts.into_iter().flatten().flatten() {
                assert_eq!((abort.rank, abort.cause), (0, Cause::gave_up("enough")));
            }
        });
    }
}

/// A group has the store of the world.
pub(super) fn groups_reach_the_store_of_the_world(fabric: &'static dyn Fabric) {
    let program = move |mut transport: Box<dyn Transport>| {
        let group = transport.fork(&[1, 2]).unwrap();
        if let Some(store) = has_store(fabric, transport.store()) {
            if let Some(group) = group {
                let store = group.store().unwrap();
                store.add("members", 1).unwrap();
                store.wait("from outside").unwrap();
            } else {
                store.set("from outside", b"").unwrap();
            }
        }
    };
    Backend(fabric).check(3, program, drop);
}

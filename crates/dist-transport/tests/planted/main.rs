//! Planted bugs for the explorer to find: each within 2,000 seeds, and none in a correct program.
#![cfg(feature = "sim")]
#![allow(clippy::unwrap_used, reason = "a failing rank ends the test, and the tests look for failures")]

mod runner;
mod threads;

use dist_transport::sim::{Network, SimTransport};
use rstest::rstest;

/// The expected result of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bug {
    Planted,
    Absent,
}

impl Bug {
    fn is_planted(self) -> bool {
        self == Self::Planted
    }
}

const SEEDS: u64 = 2000;

#[rstest]
#[case::a_chunk_is_sent_too_early(4, runner::sends_another_chunk)]
#[case::the_last_step_is_left_out(4, runner::leaves_out_a_step)]
#[case::all_receive_first(3, runner::receives_before_it_sends)]
#[case::one_goes_round_the_other_way(4, runner::goes_the_other_way)]
#[case::a_sum_is_added_twice(3, runner::reduces_twice)]
#[case::halves_run_without_waiting_for_each_other(3, runner::sends_what_has_not_come)]
#[case::groups_are_made_in_another_order(4, runner::forks_in_another_order)]
#[case::frames_are_dealt_as_they_come(2, runner::deals_frames_as_they_come)]
#[case::a_number_of_the_world_is_used_in_a_group(4, runner::confuses_numbers)]
#[case::a_rank_leaves_too_early(3, runner::leaves_too_early)]
#[case::answers_are_kept_as_they_come(4, runner::keeps_answers_as_they_come)]
#[case::a_buffer_is_used_again_too_early(2, runner::uses_a_buffer_too_early)]
#[case::time_is_taken_for_agreement(2, runner::trusts_in_time)]
#[case::all_send_first(3, runner::fills_the_window)]
#[case::a_flag_is_set_after_the_wake_up(1, threads::wakes_before_it_sets)]
#[case::the_waiter_registers_too_late(1, threads::registers_too_late)]
#[case::one_of_two_is_woken(1, threads::wakes_one_of_two)]
#[case::a_count_is_read_and_written_apart(1, threads::counts_in_two_steps)]
#[case::a_queue_is_looked_at_and_taken_from_apart(1, threads::looks_and_takes_apart)]
#[case::two_locks_are_taken_in_two_orders(1, threads::takes_locks_in_two_orders)]
#[case::a_barrier_is_used_again(1, threads::uses_a_barrier_again)]
#[case::a_result_is_read_before_its_thread_has_ended(1, threads::reads_before_the_end)]
#[case::the_end_overtakes_what_is_queued(1, threads::forgets_queued_items)]
fn a_planted_bug_is_found_and_none_where_there_is_none(
    #[case] world_size: usize,
    #[case] program: fn(SimTransport, Bug),
) {
    let network = Network::new(world_size).with_window(64);
    let found = network.find(0..SEEDS, move |transport| program(transport, Bug::Planted));
    let found = found.expect("a planted bug is found");
    // The seed finds it again.
    let again = network.find(found.seed()..=found.seed(), move |transport| program(transport, Bug::Planted));
    assert_eq!(again.unwrap().to_string(), found.to_string());
    let none = network.find(0..SEEDS, move |transport| program(transport, Bug::Absent));
    assert!(none.is_none(), "{}", none.unwrap());
}

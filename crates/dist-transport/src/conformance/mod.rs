//! The conformance suite: the promises of every transport, as tests.
//!
//! Each promise of [`Transport`](crate::Transport) is a function whose name states it, and which panics if the
//! promise is broken. [`check`] runs one by its name. [`conformance!`](crate::conformance!) makes a test of each.
//! The transports of this crate pass it. A promise is a program of each rank that uses only the trait and
//! relies only on its documentation: for example, a send may wait for its receiver.
//!
//! ```
//! use dist_transport::conformance::{self, Fabric, TransportProgram};
//! use dist_transport::shm_group::Reach;
//! use dist_transport::sim;
//!
//! struct Simulated;
//!
//! impl Fabric for Simulated {
//!     fn run(&self, run: u64, world_size: usize, program: TransportProgram) {
//!         let _ = sim::run(run, world_size, move |transport| program(Box::new(transport)));
//!     }
//!     fn shared_memory(&self) -> Option<Reach> {
//!         None
//!     }
//!     fn runs(&self) -> u64 {
//!         8
//!     }
//! }
//!
//! // In a test file: a test of each promise.
//! dist_transport::conformance!(Simulated);
//!
//! // Or one of them.
//! conformance::check("messages::messages_go_round_a_ring", &Simulated);
//! ```
#![allow(clippy::unwrap_used, reason = "a promise that is broken ends in a panic")]

mod aborts;
mod announced;
mod backend;
mod calls;
mod errors;
mod exposed;
mod forks;
mod many_messages;
mod matched;
mod messages;
mod native;
mod rank_result;
mod shm_group;
mod store;
mod unchecked;
mod waits;

pub use backend::{Fabric, Processes, TransportProgram};
pub use unchecked::Unchecked;

/// Makes a test of each promise of [`conformance`](mod@crate::conformance), for the [`Fabric`] given as a
/// constant expression.
#[macro_export]
macro_rules! conformance {
    // The promises, for one of the arms below.
    (@all $($arm:tt)*) => {
        $crate::conformance! { $($arm)* =>
            shm_group {
                all_ranks_of_a_group_share_memory_or_none_does
                a_rank_that_waits_for_a_signal_sees_the_published_bytes
                after_a_fused_barrier_every_rank_has_the_bytes_of_all
                each_signal_of_a_call_publishes_earlier_writes
                bytes_that_a_rank_is_still_reading_are_not_overwritten
                all_ranks_in_shared_memory_get_the_error_of_differing_calls
                differing_calls_in_shared_memory_are_detected_without_waits
                contradicting_calls_are_reported_by_ranks_that_ran_ahead
                a_rank_that_leaves_shared_memory_is_named
                a_rank_that_leaves_a_group_before_it_shares_memory_is_named
                an_abort_wakes_ranks_that_wait_in_shared_memory
                groups_share_memory_of_their_own
                a_rank_sees_its_own_places
            }
            exposed {
                memory_that_is_exposed_is_read_and_written
                lent_memory_is_returned_by_its_own_call_only
                memory_of_several_ranks_is_changed_at_once
                words_of_every_rank_are_changed_by_all
                one_rank_at_a_time_swaps_a_word
                bytes_written_after_a_call_failed_are_no_result_of_it
                memory_that_is_not_exposed_is_out_of_reach_without_harm
            }
            errors {
                a_message_of_another_call_is_refused_on_every_rank_before_a_byte_is_delivered
                a_message_of_another_length_is_refused_on_every_rank_before_a_byte_is_delivered
                an_exchange_in_place_with_a_peer_that_disagrees_combines_nothing
                a_rank_that_leaves_is_named_after_its_last_message_has_arrived
                an_abort_wakes_every_wait_and_stands_for_ever
                a_panic_with_the_transport_in_hand_is_the_cause_everywhere
                a_panic_of_a_function_that_is_given_bytes_is_the_cause_everywhere
                a_peer_outside_the_group_is_refused_without_harm
                receiving_into_memory_of_another_length_is_refused_without_harm
                contradicting_calls_are_reported_long_before_the_deadline
                a_rank_that_leaves_before_its_first_message_is_named
            }
            aborts {
                all_ranks_have_one_record_wherever_they_wait
            }
            forks {
                messages_of_different_channels_never_mix
                a_channel_that_waits_does_not_hold_up_another
                a_group_is_numbered_in_the_order_of_its_list_and_others_get_none
                a_group_of_a_group_is_translated_twice
                one_call_makes_several_groups_that_share_no_rank
                a_list_of_members_that_makes_no_group_is_refused_without_harm
                an_error_in_a_group_ends_the_job_and_names_ranks_of_the_world
                a_rank_may_leave_if_no_rank_waits_for_it
                a_rank_that_leaves_a_group_is_noticed_there_although_it_stays_in_the_job
                a_rank_that_comes_late_to_a_group_is_waited_for
                members_make_groups_that_other_ranks_do_not_count
                a_rank_that_leaves_a_group_of_its_members_only_is_noticed
            }
            messages {
                messages_go_round_a_ring
                first_messages_wait_only_for_their_receiver
                a_rank_exchanges_with_itself
                messages_of_a_pair_arrive_in_order_at_any_length
                both_halves_may_differ_in_peer_and_length
                pieces_tile_the_message_and_are_aligned
                an_exchange_in_place_combines_every_byte_once_with_the_original_of_the_peer
                messages_and_bytes_are_counted
            }
            many_messages {
                every_rank_sends_several_messages_to_every_rank_at_once
                messages_at_once_are_refused_as_single_ones_are
                peers_without_a_message_are_returned_without_harm
                a_rank_that_polls_for_messages_sees_them_arrive
                a_peer_without_a_message_does_not_delay_another
                a_rank_sees_its_own_messages_and_refuses_ranks_outside_the_group
                a_wait_for_any_peer_ends_with_the_job
                calls_of_ranks_that_wait_for_any_peer_are_compared_too
                ranks_that_share_a_machine_have_one_host
            }
            matched {
                matched_messages_arrive_whole_and_in_order_with_their_calls
                a_short_matched_message_does_not_wait_until_its_receiver_enters_a_call
                a_matched_message_that_is_refused_ends_the_job
                a_wait_for_a_matched_message_ends_in_time_and_names_the_peer
                matched_messages_are_counted_and_unread_until_they_are_received
                an_exchange_that_pauses_goes_on_in_the_next_call
                a_wait_for_a_matched_message_ends_when_another_thread_interrupts_it
            }
            announced {
                a_long_matched_message_waits_for_its_receive_and_later_ones_pass_it
                a_sender_of_a_long_matched_message_keeps_messages_of_its_receiver
                a_long_matched_message_that_nothing_wants_ends_in_time_and_names_its_receiver
                ranks_that_wait_for_the_receives_of_each_other_are_told_soon
            }
            native {
                collectives_of_a_library_have_the_result_of_all_ranks
                a_collective_of_a_library_is_refused_on_every_rank_if_calls_differ
                a_rank_that_does_not_come_to_a_collective_of_a_library_is_named
            }
            store {
                values_that_one_rank_sets_reach_all
                each_sum_is_the_result_of_one_rank_only
                one_of_several_ranks_comes_first
                values_up_to_the_limit_arrive_whole
                a_wait_for_a_key_ends_at_its_deadline_and_names_the_key
                an_abort_ends_every_wait_for_a_key
                groups_reach_the_store_of_the_world
            }
            waits {
                a_wait_ends_at_its_deadline_and_names_the_peer
                the_last_rank_of_a_chain_of_waits_is_named
                ranks_that_wait_in_a_circle_are_told_soon
                calls_on_two_channels_that_wait_for_each_other_are_told_soon
                a_late_rank_ends_the_waits_of_all_others
                a_rank_that_waits_no_longer_is_named
                a_wait_in_shared_memory_ends_at_its_deadline_and_names_the_peer
                the_last_rank_of_a_chain_of_waits_in_shared_memory_is_named
                a_rank_that_waits_no_longer_in_shared_memory_is_named
            }
        }
    };
    (@tests $fabric:expr => $($module:ident { $($promise:ident)* })*) => {
        $($(
            #[test]
            fn $promise() {
                $crate::conformance::check(concat!(stringify!($module), "::", stringify!($promise)), &$fabric);
            }
        )*)*
    };
    (@table => $($module:ident { $($promise:ident)* })*) => {
        &[$($((concat!(stringify!($module), "::", stringify!($promise)), $module::$promise)),*),*]
    };
    ($fabric:expr) => {
        $crate::conformance! { @all @tests $fabric }
    };
    ($fabric:expr => $($promises:tt)*) => {
        $crate::conformance! { @tests $fabric => $($promises)* }
    };
}

/// A promise and its name.
type Promise = (&'static str, fn(&'static dyn Fabric));

/// The promises by their names. A promise that is not listed is never used, of which the compiler warns.
const PROMISES: &[Promise] = conformance! { @all @table };

/// Returns the names of all promises.
pub fn promises() -> impl Iterator<Item = &'static str> {
    PROMISES.iter().map(|(name, _)| *name)
}

/// Checks the promise with this name, which is that of its module and of its test.
///
/// # Panics
/// If the promise is broken, or there is none with this name.
pub fn check(promise: &str, fabric: &'static dyn Fabric) {
    let (_, check) = PROMISES.iter().find(|(name, _)| *name == promise).expect("a promise has this name");
    check(fabric);
}

//! Every schedule is valid, and holds and waits as much as its formulas say.

use std::time::Duration;

use dist_parallel::Error;
use dist_parallel::pipeline::{
    Action, Costs, Flaw, Item, PipelineSchedule, ScheduleKind, StageCost, Timeline,
};
use rstest::rstest;

const KINDS: [ScheduleKind; 7] = [
    ScheduleKind::Gpipe,
    ScheduleKind::OneForwardOneBackward,
    ScheduleKind::Interleaved { stages_per_rank: 1 },
    ScheduleKind::Interleaved { stages_per_rank: 2 },
    ScheduleKind::Interleaved { stages_per_rank: 4 },
    ScheduleKind::Zb1p,
    ScheduleKind::Zbv,
];

const UNIT: Duration = Duration::from_millis(1);

/// Returns costs with one unit per part for all stages of a rank together.
fn units(kind: ScheduleKind, ranks: usize) -> Costs {
    let part = UNIT / u32::try_from(kind.stages_per_rank()).unwrap();
    let stage = StageCost { forward: part, input_gradient: part, weight_gradient: part };
    Costs::uniform(ranks * kind.stages_per_rank(), stage)
}

/// Checks the table in the documentation of `ScheduleKind`.
fn kept(kind: ScheduleKind, ranks: usize, micro_batches: usize, rank: usize) -> usize {
    match kind {
        ScheduleKind::Gpipe => micro_batches,
        ScheduleKind::OneForwardOneBackward => micro_batches.min(ranks - rank),
        ScheduleKind::Interleaved { stages_per_rank: v } => {
            (v * micro_batches).min(2 * (ranks - rank - 1) + (v - 1) * ranks + 1)
        }
        ScheduleKind::Zb1p => micro_batches.min(ranks),
        ScheduleKind::Zbv => 2 * micro_batches.min(ranks),
    }
}

#[test]
fn every_schedule_of_every_size_is_valid_and_holds_the_activations_of_its_formula() {
    for kind in KINDS {
        for (ranks, micro_batches) in (1..=8).flat_map(|ranks| (1..=20).map(move |count| (ranks, count))) {
            let schedule = kind.schedule(ranks, micro_batches).unwrap();
            let proof = schedule.validate();
            let proof = proof.unwrap_or_else(|flaw| panic!("{kind:?} {ranks} {micro_batches}: {flaw}"));
            for (rank, &found) in proof.kept.iter().enumerate() {
                let formula = kept(kind, ranks, micro_batches, rank);
                assert_eq!(schedule.kept_max()[rank], formula, "{kind:?} {ranks} {micro_batches}");
                // Incomplete rounds hold fewer activations than the formula.
                let whole =
                    !matches!(kind, ScheduleKind::Interleaved { .. }) || micro_batches.is_multiple_of(ranks);
                let whole = whole && (kind != ScheduleKind::Zbv || micro_batches >= 2 * ranks);
                assert!(
                    found <= formula && (!whole || found == formula),
                    "{kind:?} {ranks} {micro_batches}: {found} {formula}"
                );
            }
            let edges = schedule.placement().windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert_eq!(proof.messages, 2 * edges * micro_batches);
        }
    }
}

#[rstest]
fn with_unit_times_the_waits_agree_with_the_formula(#[values(1, 2, 3, 4, 6, 8)] ranks: usize) {
    for kind in KINDS {
        let (mut told, costs) = (0, units(kind, ranks));
        for micro_batches in 1..=24 {
            let schedule = kind.schedule(ranks, micro_batches).unwrap();
            let timeline = Timeline::predict(&schedule, &costs);
            let Some(formula) = kind.bubble(ranks, micro_batches, &costs) else { continue };
            told += 1;
            let found = timeline.bubble();
            assert!((found - formula).abs() < 1e-9, "{kind:?} {ranks} {micro_batches}: {found} {formula}");
        }
        assert!(told > 0, "{kind:?} has no formula");
    }
}

#[rstest]
fn no_rank_waits_in_zbv_after_its_first_computation(
    #[values(1, 2, 3, 4, 6, 8)] ranks: usize,
    #[values(0, 1, 5)] more: usize,
) {
    let schedule = ScheduleKind::Zbv.schedule(ranks, 2 * ranks + more).unwrap();
    for spans in Timeline::predict(&schedule, &units(ScheduleKind::Zbv, ranks)).ranks {
        assert!(spans.windows(2).all(|pair| pair[0].end == pair[1].start), "{spans:?}");
    }
}

#[test]
fn backwards_that_take_longer_leave_the_bubble_of_1f1b_as_it_is() {
    let stage = StageCost { forward: UNIT, input_gradient: 3 * UNIT, weight_gradient: 2 * UNIT };
    let costs = Costs::uniform(4, stage);
    for kind in [ScheduleKind::Gpipe, ScheduleKind::OneForwardOneBackward] {
        let timeline = Timeline::predict(&kind.schedule(4, 8).unwrap(), &costs);
        assert!((timeline.bubble() - 3.0 / 8.0).abs() < 1e-9);
        assert_eq!(timeline.makespan(), (8 + 3) * 6 * UNIT);
    }
}

#[test]
fn messages_that_take_time_are_waited_for() {
    let costs = Costs::uniform(2, StageCost { forward: UNIT, ..StageCost::default() });
    let timeline =
        Timeline::predict(&ScheduleKind::Gpipe.schedule(2, 1).unwrap(), &costs.with_message(5 * UNIT));
    // Forward, message, forward, backward without duration, message back.
    assert_eq!(timeline.makespan(), 12 * UNIT);
}

#[rstest]
#[case(ScheduleKind::Gpipe, 0, 4)]
#[case(ScheduleKind::Zb1p, 4, 0)]
#[case(ScheduleKind::Interleaved { stages_per_rank: 0 }, 4, 4)]
#[case(ScheduleKind::OneForwardOneBackward, usize::MAX, 2)]
#[case(ScheduleKind::Zbv, 1 << 20, 1 << 20)]
#[case::time_grows_with_the_square_of_the_ranks(ScheduleKind::Gpipe, 1 << 13, 1)]
#[case::and_of_the_stages(ScheduleKind::Interleaved { stages_per_rank: 1 << 10 }, 1 << 3, 1)]
fn there_is_no_schedule_for_nothing_and_none_for_too_much(
    #[case] kind: ScheduleKind,
    #[case] ranks: usize,
    #[case] micro_batches: usize,
) {
    let error = kind.schedule(ranks, micro_batches).unwrap_err();
    assert!(matches!(error, Error::NoSchedule { ranks: told, .. } if told == ranks), "{error}");
}

#[test]
fn names_lead_to_kinds() {
    assert!(ScheduleKind::ALL.into_iter().all(|kind| ScheduleKind::parse(kind.name()) == Some(kind)));
    assert_eq!(ScheduleKind::parse("2f2b"), None);
}

#[test]
fn a_rank_of_1f1b_has_the_expected_actions() {
    let schedule = ScheduleKind::OneForwardOneBackward.schedule(2, 3).unwrap();
    let text =
        |rank: usize| schedule.actions()[rank].iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    assert_eq!(text(0), "0F0 0SF0 0F1 0SF1 0RB0 0B0 0F2 0SF2 0RB1 0B1 0RB2 0B2 0R");
    assert_eq!(text(1), "1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1 1RF2 1F2 1B2 1SB2 1R");
}

#[rstest]
fn stages_are_gathered_when_needed_and_never_more_than_allowed(
    #[values(1, 2, 3)] gathered_max: usize,
    #[values(1, 2, 4)] ranks: usize,
) {
    for kind in KINDS {
        let schedule = kind.schedule(ranks, 6).unwrap().with_gathers(gathered_max);
        schedule.validate().unwrap();
        for list in schedule.actions() {
            let (mut now, mut gathers) = (0, 0);
            for action in list {
                match action {
                    Action::Gather(_) => (now, gathers) = (now + 1, gathers + 1),
                    Action::Free(_) => now -= 1,
                    _ => {}
                }
                assert!(now <= gathered_max);
            }
            let stages = kind.stages_per_rank();
            assert!(gathers >= stages && (stages > gathered_max || gathers == stages), "{gathers}");
        }
    }
}

fn own(placement: &[usize], micro_batches: usize, lists: &[&[Action]]) -> Result<(), Flaw> {
    let lists: Vec<Vec<Action>> = lists.iter().map(|list| list.to_vec()).collect();
    let kept_max = vec![4; lists.len()];
    PipelineSchedule::new(placement.to_vec(), micro_batches, kept_max, lists).validate().map(drop)
}

const F0: Action = Action::Forward(Item::new(0, 0));
const B0: Action = Action::Backward(Item::new(0, 0));
const I0: Action = Action::InputGradient(Item::new(0, 0));
const F1: Action = Action::Forward(Item::new(1, 0));
const B1: Action = Action::Backward(Item::new(1, 0));

#[test]
fn flaws_are_named() {
    assert!(matches!(own(&[], 1, &[]), Err(Flaw::Shape { .. })));
    assert!(matches!(own(&[0], 0, &[&[]]), Err(Flaw::Shape { .. })));
    assert_eq!(own(&[0, 2], 1, &[&[], &[]]), Err(Flaw::Placement { stage: 1, rank: 2, ranks: 2 }));
    assert_eq!(own(&[0], 1, &[&[F0]]), Err(Flaw::Missing { action: B0 }));
    assert_eq!(own(&[0], 1, &[&[F0, F0, B0]]), Err(Flaw::Twice { rank: 0, action: F0 }));
    assert_eq!(own(&[0], 1, &[&[F0, I0, B0]]), Err(Flaw::Twice { rank: 0, action: B0 }));
    assert_eq!(own(&[0], 1, &[&[B0, F0]]), Err(Flaw::TooEarly { rank: 0, action: B0 }));
    let nowhere = Action::Forward(Item::new(usize::MAX, 0));
    assert_eq!(own(&[0], 1, &[&[nowhere]]), Err(Flaw::NotOwn { rank: 0, action: nowhere }));
    assert_eq!(own(&[0, 0], 1, &[&[F0, F1, B1, B0]]), Ok(()));
    assert_eq!(own(&[0, 0], 1, &[&[F0, F1, B0, B1]]), Err(Flaw::TooEarly { rank: 0, action: B0 }));
    assert_eq!(own(&[0, 1], 1, &[&[F0, B0], &[F1, B1]]), Ok(()));
}

#[test]
fn ranks_that_wait_for_each_other_are_found() {
    // Rank 0 has stages 0 and 2, rank 1 has 1 and 3. With two micro-batches, each waits for the other's gradients.
    let item = |stage, micro_batch| Item::new(stage, micro_batch);
    let list = |of: &[(char, usize, usize)]| -> Vec<Action> {
        let action = |&(what, stage, micro_batch): &(char, usize, usize)| match what {
            'F' => Action::Forward(item(stage, micro_batch)),
            _ => Action::Backward(item(stage, micro_batch)),
        };
        of.iter().map(action).collect()
    };
    let zero = list(&[
        ('F', 0, 0),
        ('F', 2, 0),
        ('B', 2, 0),
        ('F', 0, 1),
        ('F', 2, 1),
        ('B', 2, 1),
        ('B', 0, 0),
        ('B', 0, 1),
    ]);
    let one = list(&[
        ('F', 1, 0),
        ('F', 3, 0),
        ('B', 3, 0),
        ('B', 1, 0),
        ('F', 1, 1),
        ('F', 3, 1),
        ('B', 3, 1),
        ('B', 1, 1),
    ]);
    let fine = PipelineSchedule::new(vec![0, 1, 0, 1], 2, vec![4, 4], vec![zero.clone(), one.clone()]);
    fine.validate().unwrap();
    let mut stuck = zero;
    stuck.swap(3, 6);
    let mut other = one;
    other.swap(3, 4);
    let stuck = PipelineSchedule::new(vec![0, 1, 0, 1], 2, vec![4, 4], vec![stuck, other]);
    let flaw = stuck.validate().unwrap_err();
    assert_eq!(flaw, Flaw::Deadlock { rank: 0, action: Action::ReceiveGradient(item(0, 0)) });
}

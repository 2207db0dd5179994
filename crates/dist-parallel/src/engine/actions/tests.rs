//! The orders of actions under each strategy, and their proof.

use std::fmt;

use rstest::rstest;

use super::*;
use crate::fsdp::Units;
use crate::pipeline::ScheduleKind;
use crate::{FloatType, ParamInfo};

/// Formats like `G1` for gathering unit 1 and `F1.0` for the forward of micro-batch 0 in it. A stage other than 0 comes
/// first: `2:F1.0`.
impl fmt::Display for StepAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = |f: &mut fmt::Formatter<'_>, UnitOf { stage, unit }: UnitOf, name: &str| match stage {
            0 => write!(f, "{name}{unit}"),
            _ => write!(f, "{stage}:{name}{unit}"),
        };
        match *self {
            Self::Gather(of) => unit(f, of, "G"),
            Self::Materialise { unit: of, keep: false } => unit(f, of, "M"),
            Self::Materialise { unit: of, keep: true } => unit(f, of, "K"),
            Self::Free(of) => unit(f, of, "X"),
            Self::Compute(of, micro_batch) => {
                unit(f, of, "U")?;
                write!(f, ".{micro_batch}")
            }
            Self::Forward(of, micro_batch) => {
                unit(f, of, "F")?;
                write!(f, ".{micro_batch}")
            }
            Self::Loss(micro_batch) => write!(f, "L.{micro_batch}"),
            Self::Backward(of, micro_batch, part) => {
                let name = match part {
                    BackwardPart::Whole => "B",
                    BackwardPart::Input => "I",
                    BackwardPart::Weight => "W",
                };
                unit(f, of, name)?;
                write!(f, ".{micro_batch}")
            }
            Self::Close(of, micro_batch) => {
                unit(f, of, "C")?;
                write!(f, ".{micro_batch}")
            }
            Self::Reduce(stage) => write!(f, "R{stage}"),
            Self::SendActivation(item) => Action::SendActivation(item).fmt(f),
            Self::ReceiveActivation(item) => Action::ReceiveActivation(item).fmt(f),
            Self::SendGradient(item) => Action::SendGradient(item).fmt(f),
            Self::ReceiveGradient(item) => Action::ReceiveGradient(item).fmt(f),
        }
    }
}

/// Returns a layout with blocks of one parameter each. If `tied`, the last block has the parameter of the first.
fn layout(blocks: usize, tied: bool) -> Layout {
    let mut infos: Vec<ParamInfo> =
        (0..blocks).map(|index| ParamInfo::new(format!("p{index}"), [3], FloatType::F32)).collect();
    if tied {
        infos[blocks - 1].same_as = Some(0);
    }
    Layout::new(&infos, &Vec::from_iter(0..=blocks), &Units::EachBlock, 2).unwrap()
}

/// Returns the actions of one micro-batch in one stage, as text.
fn one(layout: &Layout, policy: GatherPolicy, trains: bool) -> String {
    let item = Item::new(0, 0);
    let list = [Action::Forward(item), Action::Backward(item)];
    let stages = [StageUnits { number: 0, layout, policy }];
    text(&step_actions(if trains { &list } else { &list[..1] }, &stages, 0))
}

fn text(actions: &[StepAction]) -> String {
    actions.iter().map(StepAction::to_string).collect::<Vec<_>>().join(" ")
}

const fn each_use(prefetch: usize, reshard: Reshard) -> GatherPolicy {
    GatherPolicy::EachUse { prefetch, reshard }
}

#[rstest]
#[case::data_parallel(GatherPolicy::Never, "F0.0 F1.0 L.0 B1.0 C1.0 B0.0 C0.0")]
#[case::no_prefetch(
    each_use(0, Reshard::All),
    "G0 M0 F0.0 X0 G1 M1 F1.0 X1 G1 L.0 M1 B1.0 X1 C1.0 G0 M0 B0.0 X0 C0.0"
)]
#[case::prefetch(
    each_use(1, Reshard::All),
    "G0 G1 M0 F0.0 X0 M1 F1.0 X1 G1 G0 L.0 M1 B1.0 X1 C1.0 M0 B0.0 X0 C0.0"
)]
#[case::the_last_unit_stays(
    each_use(0, Reshard::AllButLast),
    "G0 M0 F0.0 X0 G1 M1 F1.0 L.0 B1.0 X1 C1.0 G0 M0 B0.0 X0 C0.0"
)]
#[case::all_units_stay(each_use(0, Reshard::Nothing), "G0 M0 F0.0 G1 M1 F1.0 L.0 B1.0 X1 C1.0 B0.0 X0 C0.0")]
#[case::a_group_keeps_them(
    each_use(0, Reshard::ToGroup(2)),
    "G0 K0 F0.0 X0 G1 K1 F1.0 X1 G1 L.0 M1 B1.0 X1 C1.0 G0 M0 B0.0 X0 C0.0"
)]
#[case::for_the_whole_pass(GatherPolicy::WithStage, "G0 G1 M0 F0.0 M1 F1.0 L.0 B1.0 C1.0 B0.0 C0.0 X0 X1")]
fn a_micro_batch_has_the_order_of_its_strategy(#[case] policy: GatherPolicy, #[case] expected: &str) {
    assert_eq!(one(&layout(2, false), policy, true), expected);
}

#[test]
fn own_code_computes_the_whole_model_once_and_closes_all_units() {
    let tied = layout(3, true);
    let stage = StageUnits { number: 0, layout: &tied, policy: GatherPolicy::Never };
    assert_eq!(text(&own_code_actions(stage)), "U0.0 C2.0 C1.0 C0.0 C3.0");
}

#[test]
fn the_root_unit_is_gathered_from_the_first_use_to_the_last() {
    let tied = layout(3, true);
    assert_eq!(
        one(&tied, each_use(0, Reshard::All), true),
        "G3 M3 F0.0 G1 M1 F1.0 X1 F2.0 L.0 B2.0 C2.0 G1 M1 B1.0 X1 C1.0 B0.0 C0.0 X3 C3.0"
    );
    assert_eq!(one(&tied, each_use(0, Reshard::All), false), "G3 M3 F0.0 G1 M1 F1.0 X1 F2.0 X3 L.0");
    assert_eq!(
        one(&tied, GatherPolicy::WithStage, true),
        "G1 G3 M3 F0.0 M1 F1.0 F2.0 L.0 B2.0 C2.0 B1.0 C1.0 B0.0 C0.0 C3.0 X1 X3"
    );
}

#[test]
fn the_stages_of_a_pipeline_are_divided_into_the_same_units() {
    let (layout, policy) = (layout(2, false), GatherPolicy::WithStage);
    let schedule = ScheduleKind::OneForwardOneBackward.schedule(2, 2).unwrap();
    let of_rank = |rank: usize, policy| {
        let stages = [StageUnits { number: rank, layout: &layout, policy }];
        text(&step_actions(&schedule.clone().with_gathers(1).actions()[rank], &stages, 1))
    };
    assert_eq!(
        of_rank(0, policy),
        "G0 G1 M0 F0.0 M1 F1.0 0SF0 F0.1 F1.1 0SF1 0RB0 B1.0 C1.0 B0.0 C0.0 0RB1 B1.1 C1.1 B0.1 C0.1 R0 X0 X1"
    );
    assert_eq!(
        of_rank(1, GatherPolicy::Never),
        "1RF0 1:F0.0 1:F1.0 L.0 1:B1.0 1:C1.0 1:B0.0 1:C0.0 1SB0 \
         1RF1 1:F0.1 1:F1.1 L.1 1:B1.1 1:C1.1 1:B0.1 1:C0.1 1SB1 R1"
    );
}

#[rstest]
fn units_are_gathered_when_used_and_never_more_than_prefetch_allows(
    #[values(1, 2, 3, 6)] blocks: usize,
    #[values(0, 1, 2, 3, 9, usize::MAX)] prefetch: usize,
    #[values(Reshard::All, Reshard::AllButLast, Reshard::Nothing, Reshard::ToGroup(1))] reshard: Reshard,
    #[values(false, true)] tied: bool,
) {
    let layout = layout(blocks.max(2), tied);
    let stage = StageUnits { number: 0, layout: &layout, policy: each_use(prefetch, reshard) };
    let item = Item::new(0, 0);
    let list = [Action::Forward(item), Action::Backward(item)];
    let actions = step_actions(&list, &[stage], 0);
    assert_eq!(validate(&actions, &[stage]), Ok(()));
    let (mut gathering, mut loaded) = (Vec::new(), Vec::new());
    let (mut gathers, mut closed) = (0, Vec::new());
    for (index, action) in actions.into_iter().enumerate() {
        match action {
            StepAction::Gather(unit) => {
                gathering.push(unit);
                gathers += 1;
            }
            StepAction::Materialise { unit, .. } => {
                gathering.retain(|&other| other != unit);
                loaded.push(unit);
            }
            StepAction::Free(unit) => loaded.retain(|&other| other != unit),
            StepAction::Close(unit, _) => closed.push(unit),
            _ => {}
        }
        let kept = |unit: &UnitOf| stage.keeps(*unit) || Some(*unit) == stage.root();
        let passing = gathering.iter().chain(loaded.iter().filter(|unit| !kept(unit))).count();
        assert!(passing <= prefetch.saturating_add(1), "after action {index}");
    }
    let units = || stage.with_blocks().into_iter().chain(stage.root());
    let with_parameters = units().filter(|&unit| stage.has_parameters(unit)).count();
    let kept =
        stage.with_blocks().into_iter().filter(|&unit| stage.has_parameters(unit) && stage.keeps(unit));
    assert_eq!(gathers, 2 * with_parameters - usize::from(tied) - kept.count());
    assert_eq!(closed.len(), layout.units.len());
    let alone = step_actions(&list[..1], &[stage], 0);
    let count = |wanted: fn(&StepAction) -> bool| alone.iter().filter(|action| wanted(action)).count();
    assert_eq!(count(|action| matches!(action, StepAction::Gather(_))), with_parameters);
    assert_eq!(count(|action| matches!(action, StepAction::Free(_))), with_parameters);
}

#[rstest]
fn every_schedule_of_sharded_stages_can_be_executed(
    #[values("gpipe", "1f1b", "interleaved", "zb1p", "zbv")] kind: &str,
    #[values(1, 2, 3)] ranks: usize,
    #[values(0, 1, 2)] gathered: usize,
    #[values(false, true)] tied: bool,
) {
    let mut schedule = ScheduleKind::parse(kind).unwrap().schedule(ranks, 6).unwrap();
    if gathered > 0 {
        schedule = schedule.with_gathers(gathered);
    }
    let layout = layout(3, tied);
    for rank in 0..ranks {
        let own = (0..schedule.stages()).filter(|&stage| schedule.placement()[stage] == rank);
        let stages: Vec<_> = own
            .map(|number| StageUnits { number, layout: &layout, policy: GatherPolicy::WithStage })
            .collect();
        let last = schedule.stages() - 1;
        let actions = step_actions(&schedule.actions()[rank], &stages, last);
        assert_eq!(validate(&actions, &stages), Ok(()));
        let evaluated = step_actions(&schedule.forwards(rank, 4).unwrap(), &stages, last);
        assert_eq!(validate(&evaluated, &stages), Ok(()));
        let losses = |actions: &[StepAction]| {
            actions.iter().filter(|action| matches!(action, StepAction::Loss(_))).count()
        };
        let has_last = schedule.placement()[last] == rank;
        assert_eq!([losses(&actions), losses(&evaluated)], if has_last { [6, 4] } else { [0, 0] });
    }
}

#[test]
fn a_list_that_cannot_be_executed_is_refused() {
    let layout = layout(2, false);
    let stages = [StageUnits { number: 0, layout: &layout, policy: each_use(0, Reshard::All) }];
    let item = Item::new(0, 0);
    let list = step_actions(&[Action::Forward(item), Action::Backward(item)], &stages, 0);
    for removed in 0..list.len() {
        let is_needed = !matches!(list[removed], StepAction::Loss(_) | StepAction::Close(..));
        let is_last = matches!(list[removed], StepAction::Backward(..));
        let mut mutant = list.clone();
        mutant.remove(removed);
        assert_eq!(validate(&mutant, &stages).is_err(), is_needed && !is_last, "without {}", list[removed]);
    }
    let twice: Vec<_> = list.iter().flat_map(|&action| [action, action]).collect();
    assert!(validate(&twice, &stages).is_err());
}

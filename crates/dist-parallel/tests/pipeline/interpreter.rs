//! An interpreter of schedules, independent of the proof.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use dist_parallel::pipeline::{Action, Item, PipelineSchedule};

/// The gradients in each stage's sum when it was reduced.
pub(crate) type Computed = BTreeMap<usize, BTreeSet<String>>;

#[derive(Default)]
struct Rank {
    next: usize,
    outputs: HashMap<Item, String>,
    inputs: HashMap<Item, String>,
    /// The gradients of a stage's output and input.
    output_gradients: HashMap<Item, String>,
    input_gradients: HashMap<Item, String>,
    weight_gradients: HashMap<Item, String>,
    summed: Computed,
    kept: usize,
}

/// Returns the result of the schedule, or the reason why it fails.
pub(crate) fn interpret(schedule: &PipelineSchedule) -> Result<Computed, String> {
    let mut ranks: Vec<Rank> = schedule.actions().iter().map(|_| Rank::default()).collect();
    let mut links: HashMap<(usize, bool), VecDeque<String>> = HashMap::new();
    let mut reduced = Computed::new();
    loop {
        let mut moved = false;
        for (rank, list) in schedule.actions().iter().enumerate() {
            while let Some(&action) = list.get(ranks[rank].next) {
                if !act(schedule, &mut ranks[rank], rank, action, &mut links, &mut reduced)? {
                    break;
                }
                ranks[rank].next += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    if ranks.iter().zip(schedule.actions()).any(|(rank, list)| rank.next < list.len()) {
        return Err("a rank waits".to_owned());
    }
    if links.values().any(|link| !link.is_empty()) {
        return Err("a message is left".to_owned());
    }
    Ok(reduced)
}

/// Executes an action. Returns `false` if it must wait.
fn act(
    schedule: &PipelineSchedule,
    rank: &mut Rank,
    number: usize,
    action: Action,
    links: &mut HashMap<(usize, bool), VecDeque<String>>,
    reduced: &mut Computed,
) -> Result<bool, String> {
    let stage = action.stage();
    if schedule.placement().get(stage) != Some(&number) {
        return Err(format!("{action} is elsewhere"));
    }
    let missing = || format!("{action} lacks something");
    match action {
        Action::Forward(item) => {
            let input = match stage.checked_sub(1) {
                None => format!("x{}", item.micro_batch),
                Some(before) if schedule.placement()[before] == number => {
                    rank.outputs.get(&Item::new(before, item.micro_batch)).ok_or_else(missing)?.clone()
                }
                Some(_) => rank.inputs.remove(&item).ok_or_else(missing)?,
            };
            if rank.outputs.insert(item, format!("f{stage}({input})")).is_some() {
                return Err("computed twice".to_owned());
            }
            rank.kept += 1;
            if rank.kept > schedule.kept_max()[number] {
                return Err("too much is kept".to_owned());
            }
        }
        Action::Backward(item) => {
            back(schedule, rank, number, item)?;
            weigh(rank, item)?;
        }
        Action::InputGradient(item) => back(schedule, rank, number, item)?,
        Action::WeightGradient(item) => weigh(rank, item)?,
        Action::SendActivation(item) => {
            let output = rank.outputs.get(&item).ok_or_else(missing)?.clone();
            links.entry((stage + 1, true)).or_default().push_back(output);
        }
        Action::SendGradient(item) => {
            let before = stage.checked_sub(1).ok_or_else(missing)?;
            let gradient = rank.input_gradients.get(&item).ok_or_else(missing)?.clone();
            links.entry((before, false)).or_default().push_back(gradient);
        }
        Action::ReceiveActivation(item) => {
            let Some(output) = links.entry((stage, true)).or_default().pop_front() else { return Ok(false) };
            rank.inputs.insert(item, output);
        }
        Action::ReceiveGradient(item) => {
            let Some(gradient) = links.entry((stage, false)).or_default().pop_front() else {
                return Ok(false);
            };
            rank.output_gradients.insert(item, gradient);
        }
        Action::ReduceGradients(_) => {
            let summed = rank.summed.get(&stage).cloned().unwrap_or_default();
            if reduced.insert(stage, summed).is_some() {
                return Err("reduced twice".to_owned());
            }
        }
        Action::Gather(_) | Action::Free(_) => {}
    }
    Ok(true)
}

fn back(schedule: &PipelineSchedule, rank: &mut Rank, number: usize, item: Item) -> Result<(), String> {
    let missing = || format!("{item:?} lacks something");
    let output = rank.outputs.get(&item).ok_or_else(missing)?;
    let gradient = match schedule.placement().get(item.stage + 1) {
        None => "loss".to_owned(),
        Some(&next) if next == number => rank
            .input_gradients
            .get(&Item::new(item.stage + 1, item.micro_batch))
            .ok_or_else(missing)?
            .clone(),
        Some(_) => rank.output_gradients.remove(&item).ok_or_else(missing)?,
    };
    let gradient = format!("d{output}·{gradient}");
    rank.weight_gradients.insert(item, gradient.clone());
    if rank.input_gradients.insert(item, gradient).is_some() {
        return Err("gone back twice".to_owned());
    }
    Ok(())
}

fn weigh(rank: &mut Rank, item: Item) -> Result<(), String> {
    let gradient =
        rank.weight_gradients.remove(&item).ok_or_else(|| format!("{item:?} has not gone back"))?;
    rank.summed.entry(item.stage).or_default().insert(gradient);
    rank.kept -= 1;
    Ok(())
}

#[test]
fn the_ranks_compute_the_bits_of_one_process() {
    use dist_parallel::pipeline::ScheduleKind;
    for kind in ScheduleKind::ALL {
        let schedule = kind.schedule(2, 3).unwrap();
        let computed = interpret(&schedule).unwrap();
        assert_eq!(computed.len(), schedule.stages());
        let last = schedule.stages() - 1;
        let output = |micro_batch: usize| {
            (0..=last).fold(format!("x{micro_batch}"), |input, stage| format!("f{stage}({input})"))
        };
        let expected: BTreeSet<String> =
            (0..3).map(|micro_batch| format!("d{}·loss", output(micro_batch))).collect();
        assert_eq!(computed[&last], expected, "{kind}");
    }
}

//! Drawings of direct schedules: the steps of every rank, from signal to signal.

use dist_transport::Rank;

use crate::direct::{DirectPlan, DirectStep};
use crate::verify::table;

/// Returns a table with a column for each rank and a line for each signal, with the steps before it. The last line
/// has the steps after all signals. Steps are written as [`DirectStep`] says.
///
/// ```
/// use dist_algos::direct::{DirectPlan, DirectCollective, one_shot, verify::draw};
/// use dist_transport::shm_group::{GroupLayout, Reach};
///
/// let shared = GroupLayout { slot_bytes: 1 << 20, eager_bytes: 4096, ..GroupLayout::on_host(Reach::Slots) };
/// let plan = DirectPlan::new((DirectCollective::Broadcast { root: 0 }, &one_shot::BROADCAST), 2, 4096, 4096, shared).unwrap();
/// let expected = "\
/// signals  rank 0       rank 1
///       1  eager=0.0 !  !
///                       ?0×1 =0.0←0(eager)
/// ";
/// assert_eq!(draw(plan), expected);
/// ```
pub fn draw(plan: DirectPlan) -> String {
    let columns: Vec<Vec<String>> = Rank::all(plan.world_size()).map(|rank| column(plan, rank)).collect();
    let titles = (0..columns.len()).map(|rank| format!("rank {rank}")).collect();
    let mut lines = vec![("signals".to_owned(), titles)];
    let signals = plan.signals() as usize;
    for line in 0..=signals {
        let cells: Vec<String> = columns.iter().map(|column| column[line].clone()).collect();
        let number = if line < signals { (line + 1).to_string() } else { String::new() };
        if line < signals || cells.iter().any(|cell| !cell.is_empty()) {
            lines.push((number, cells));
        }
    }
    table(&lines)
}

/// Returns the steps of a rank up to each of its signals, and after the last.
fn column(plan: DirectPlan, rank: Rank) -> Vec<String> {
    let mut cells = vec![Vec::new()];
    for step in plan.schedule(rank) {
        cells.last_mut().expect("there is a cell").push(step.to_string());
        if step == DirectStep::Signal {
            cells.push(Vec::new());
        }
    }
    cells.into_iter().map(|steps| steps.join(" ")).collect()
}

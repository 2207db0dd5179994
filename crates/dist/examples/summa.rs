//! Multiplies matrices that are divided into blocks on a grid of ranks (SUMMA): for each panel, the ranks that have it
//! broadcast it along their row or column of the grid, and all ranks multiply.
//!
//! `distctl run -n 4 -- target/release/examples/summa 512`
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program prints and takes its time")]

use std::ops::Range;
use std::time::Instant;

use dist::groups::dims_create;
use dist::prelude::*;

/// The elements of the two factors: small whole numbers, so that sums are exact.
const FACTORS: [fn(usize, usize) -> f64; 2] =
    [|row, column| ((7 * row + 3 * column) % 10) as f64, |row, column| ((5 * row + column) % 10) as f64];

/// Returns the part of `n` rows or columns that belongs to one of `parts` ranks.
fn part(n: usize, index: usize, parts: usize) -> Range<usize> {
    index * n / parts..(index + 1) * n / parts
}

fn block(factor: usize, rows: Range<usize>, columns: Range<usize>) -> Vec<f64> {
    rows.flat_map(|row| columns.clone().map(move |column| FACTORS[factor](row, column))).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = dist::init()?;
    let n = std::env::args().nth(1).map_or(Ok(60), |n| n.parse::<usize>())?;
    let grid = dims_create(comm.world_size(), &[None, None])?;
    let mut mesh = Mesh::new(comm, [("rows", grid[0]), ("columns", grid[1])])?;
    let place = mesh.coordinates();
    let (rows, columns) = (part(n, place[0], grid[0]), part(n, place[1], grid[1]));
    let [left, right] = [0, 1].map(|factor| block(factor, rows.clone(), columns.clone()));
    let (height, width) = (rows.len(), columns.len());

    mesh.communicator().barrier()?;
    let start = Instant::now();
    let mut product = vec![0.0; height * width];
    // A panel belongs to one column of ranks on the left and to one row of ranks on the right.
    let mut borders: Vec<usize> =
        grid.iter().flat_map(|&parts| (0..=parts).map(move |index| part(n, index, parts).start)).collect();
    borders.sort_unstable();
    borders.dedup();
    for panel in borders.windows(2).map(|pair| pair[0]..pair[1]) {
        let owner = |parts: usize| {
            (0..parts).find(|&index| part(n, index, parts).contains(&panel.start)).unwrap_or(0)
        };
        let (from_column, from_row) = (owner(grid[1]), owner(grid[0]));
        let mut lefts = vec![0.0; height * panel.len()];
        if from_column == place[1] {
            let own = panel.start - columns.start..panel.end - columns.start;
            lefts = left.chunks(width).flat_map(|row| row[own.clone()].to_vec()).collect();
        }
        let mut rights = vec![0.0; panel.len() * width];
        if from_row == place[0] {
            rights.copy_from_slice(
                &right[(panel.start - rows.start) * width..(panel.end - rows.start) * width],
            );
        }
        mesh.axis("columns")?.broadcast(&mut lefts, from_column)?;
        mesh.axis("rows")?.broadcast(&mut rights, from_row)?;
        for (sums, lefts) in product.chunks_mut(width).zip(lefts.chunks(panel.len())) {
            for (left, rights) in lefts.iter().zip(rights.chunks(width)) {
                sums.iter_mut().zip(rights).for_each(|(sum, right)| *sum += left * right);
            }
        }
    }

    let mut totals = [0.0; 2];
    for (index, element) in product.iter().enumerate() {
        let (row, column) = (rows.start + index / width, columns.start + index % width);
        totals = [totals[0] + element, totals[1] + element * ((row + 2 * column) % 13) as f64];
    }
    mesh.communicator().all_reduce(&mut totals, ReduceOp::Sum)?;
    if mesh.rank() == 0 {
        println!("sum {}, weighted {}", totals[0], totals[1]);
        println!("{:.3} ms", start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(())
}

//! Random calls of every kind and size with known results.

use dist_collectives::{Communicator, ReduceOp, Result};

/// Elements of each rank's input, from 1 to more than a cache line, a slot or a socket buffer holds.
const LENGTHS: [usize; 7] = [1, 7, 64, 1000, 4096, 40_000, 300_000];

/// A random sequence of calls, the same on all ranks.
#[derive(Debug)]
pub(super) struct Calls {
    random: fastrand::Rng,
    made: usize,
}

impl Calls {
    pub(super) fn new(seed: u64) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), made: 0 }
    }

    /// Makes the next call. Returns `true` if its result is right.
    pub(super) fn next(&mut self, comm: &mut Communicator) -> Result<bool> {
        self.made += 1;
        let (made, ranks, rank) = (self.made, comm.world_size(), comm.rank());
        let kind = self.random.u8(..9);
        let len = LENGTHS[self.random.usize(..LENGTHS.len())];
        let root = self.random.usize(..ranks);
        let of = |rank: usize| (0..len).map(move |index| input(made, rank, index));
        let own: Vec<f32> = of(rank).collect();
        let sum = |index: usize| (0..ranks).map(|rank| input(made, rank, index)).sum::<f32>();
        let is_sum = |got: &[f32]| got.iter().enumerate().all(|(index, &got)| got == sum(index));
        Ok(match kind {
            0 => {
                let mut buffer = own;
                comm.all_reduce(&mut buffer, ReduceOp::Sum)?;
                is_sum(&buffer)
            }
            1 => {
                let mut buffer = comm.alloc(len)?;
                buffer.copy_from_slice(&own);
                let buffer = comm.start_all_reduce(buffer, ReduceOp::Sum).wait()?;
                is_sum(&buffer)
            }
            2 => {
                let whole: Vec<f32> = (0..ranks).flat_map(|_| of(rank)).collect();
                let mut part = vec![0.0; len];
                comm.reduce_scatter(&whole, &mut part, ReduceOp::Sum)?;
                is_sum(&part)
            }
            3 => {
                let mut buffer = own;
                comm.reduce(&mut buffer, ReduceOp::Sum, root)?;
                rank != root || is_sum(&buffer)
            }
            4 => {
                let mut all = vec![0.0; len * ranks];
                comm.all_gather(&own, &mut all)?;
                all.into_iter().eq((0..ranks).flat_map(of))
            }
            5 => {
                let mut buffer = own;
                comm.broadcast(&mut buffer, root)?;
                buffer.into_iter().eq(of(root))
            }
            6 => {
                // A rank sends the same elements to every rank.
                let whole: Vec<f32> = (0..ranks).flat_map(|_| of(rank)).collect();
                let mut all = vec![0.0; len * ranks];
                comm.all_to_all(&whole, &mut all)?;
                all.into_iter().eq((0..ranks).flat_map(of))
            }
            7 => {
                let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                let mut received = vec![0.0; len];
                comm.send_recv(&own, to, &mut received, from)?;
                received.into_iter().eq(of(from))
            }
            _ => comm.barrier().map(|()| true)?,
        })
    }
}

/// Returns a small whole number; the sum over ranks is exact in any order.
fn input(call: usize, rank: usize, index: usize) -> f32 {
    ((call * 7 + rank * 31 + index) % 61) as f32
}

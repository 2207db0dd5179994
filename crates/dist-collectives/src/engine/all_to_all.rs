//! Operations in which every rank sends a part to every other rank.

use bytemuck::Pod;
use dist_algos::direct::DirectCollective;
use dist_algos::{Algorithm, CollectiveKind, CostModel, Memory, MessageAlgorithm, Order, Source, all_to_all};
use dist_transport::LazyDeadline;

use super::arithmetic::Arithmetic;
use super::memory::{CallInput, CallOperands};
use super::plan_cache::{CallKey, Collective};
use super::rank_layout::{RankLayout, check_length, total};
use super::{CallOptions, Engine, copy, reserve};
use crate::digest::digest;
use crate::{Call, Error, Operation, Result};

impl Engine {
    pub(crate) fn all_to_all<T: Pod>(
        &mut self,
        input: CallInput<'_, T>,
        output: &mut [T],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let CallInput { elements: input, ownership } = input;
        let part = self.check_divisible(Operation::AllToAll, input.len())?;
        check_length(Operation::AllToAll, "output", input.len(), output.len())?;
        let layout = &RankLayout::even(part, self.world_size());
        let collective = Collective::Direct(DirectCollective::AllToAll);
        let key = CallKey::in_parts::<T>(collective, layout, options).on(ownership);
        let plan = self.compile_in_parts::<T>(&key, layout, options)?;
        let algorithm = self.plan_cache.get(plan).message_algorithm();
        if algorithm.is_some_and(|algorithm| self.forwards(algorithm)) {
            return self.forward(layout, input, output, |engine, parts| {
                engine.execute_moving(plan, CallOperands::in_parts(parts, layout), options)
            });
        }
        let memory = CallOperands::in_parts(output, layout).with_input(input, layout);
        self.execute_moving(plan, memory, options)
    }

    pub(crate) fn all_to_all_v<T: Pod>(
        &mut self,
        input: &[T],
        send_counts: &[usize],
        output: &mut [T],
        receive_counts: &[usize],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let operation = Operation::AllToAll;
        let received = self.check_part_counts(input.len(), send_counts, receive_counts)?;
        check_length(operation, "output", received, output.len())?;
        let forced = options.settings.forced(operation);
        let algorithm = match forced {
            None => &all_to_all::WINDOWED,
            Some(Algorithm::Messages(algorithm)) if !self.forwards(algorithm) => algorithm,
            Some(algorithm) => return Err(Error::NeedsEvenParts { algorithm }),
        };
        let mut settings = *options.settings;
        settings.force(operation, Some(Algorithm::Messages(algorithm)));
        let options = &CallOptions { settings: &settings, ..options.clone() };
        // The key has no lengths, because they differ between the ranks. They are compared below.
        let sizes = digest((options.sizes != 0).then_some(options.sizes));
        let key = CallKey::of::<T>(Collective::UnevenAllToAll, 0, 0, sizes);
        let plan = self.compile(&key, |_| 0, options)?;
        self.begin_compiled(plan);
        let call = self.plan_cache.get(plan).call;
        let own = CountAgreement::of(send_counts, forced.is_some() || self.transport.native().is_none());
        let agreed = self.compare_counts(&call, own, [send_counts, receive_counts], options)?;
        let [sent, received] = [send_counts, receive_counts].map(RankLayout::counted);
        let memory = CallOperands::in_parts(output, &received).with_input(input, &sent).into_bytes();
        if let Some((bytes, largest)) = agreed.for_library(size_of::<T>(), self.world_size())
            && self.is_native_all_to_all_v(bytes)
        {
            return self.native_all_to_all_v(&call, (bytes, largest), memory, &options.due);
        }
        self.run_compiled(plan, memory, &Arithmetic::NONE, &options.due)
    }

    /// Checks the counts as [`check_part_counts`] does.
    pub(crate) fn check_part_counts(
        &self,
        input: usize,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<usize> {
        check_part_counts(self.world_size(), input, send_counts, receive_counts)
    }

    /// Returns `true` if an algorithm sends parts through other ranks, as Bruck's does. All parts must then have the
    /// same length.
    fn forwards(&self, algorithm: &MessageAlgorithm) -> bool {
        algorithm.sends_from(self.world_size()) == Source::Buffer
    }

    /// Runs an algorithm that forwards parts through other ranks. `run` gets a rotated copy of the input: first this
    /// rank's own part, then the part for the next rank, and so on.
    fn forward<T: Pod>(
        &mut self,
        layout: &RankLayout,
        input: &[T],
        output: &mut [T],
        run: impl FnOnce(&mut Self, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let rank = self.rank();
        let mut memory = std::mem::take(&mut self.copy);
        let parts = reserve(&mut memory, input.len(), &mut *self.transport)?;
        for place in 0..rank.world_size() {
            copy(&input[layout.range(rank.plus(place).index())], &mut parts[layout.range(place)]);
        }
        let done = run(self, parts);
        for place in 0..rank.world_size() {
            copy(&parts[layout.range(place)], &mut output[layout.range(rank.minus(place).index())]);
        }
        self.copy = memory;
        done
    }

    /// Sends one number to every rank and receives one from every rank, as a part of this call.
    fn exchange_numbers(
        &mut self,
        call: &Call,
        sent: &[u64],
        received: &mut [u64],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        // The ranks do not compare this choice, so it must not depend on settings that may differ, like the cost model.
        let model = &CostModel::default();
        let (kind, bytes) = (CollectiveKind::AllToAll, size_of_val(sent));
        let algorithm = self.algorithms.suggest(kind, self.placement, bytes, Order::Canonical, model);
        let algorithm = algorithm.expect("every operation has an algorithm for every world");
        let (layout, own) = (RankLayout::even(1, self.world_size()), self.rank.index());
        let partition = layout.partition(size_of::<u64>());
        let steps = algorithm.steps(self.rank, 0);
        if self.forwards(algorithm) {
            return self.forward(&layout, sent, received, |engine, parts| {
                let memory = Memory::new(bytemuck::cast_slice_mut(parts), partition);
                engine.run_in(call, steps, memory, &mut nothing_to_combine, due)
            });
        }
        received[own] = sent[own];
        let input = Some((bytemuck::cast_slice(sent), partition));
        let memory = Memory { buffer: bytemuck::cast_slice_mut(received), partition, input };
        self.run_in(call, steps, memory, &mut nothing_to_combine, due)
    }

    /// Sends every rank the length that it is going to receive. If a rank expects another length, all ranks return the
    /// same error. `agreement` has the values of this rank. Returns the combined values of all ranks.
    fn compare_counts(
        &mut self,
        call: &Call,
        mut agreement: CountAgreement,
        [send_counts, receive_counts]: [&[usize]; 2],
        options: &CallOptions<'_>,
    ) -> Result<CountAgreement> {
        let (rank, world_size) = (self.rank().index(), self.world_size());
        let sent: Vec<u64> = send_counts.iter().map(|&count| count as u64).collect();
        let mut announced = vec![0; world_size];
        self.exchange_numbers(call, &sent, &mut announced, &options.due)?;
        let differs = |(from, (&sent, &expected)): (usize, (&u64, &usize))| {
            (sent != expected as u64).then_some([from as u64, rank as u64, sent, expected as u64])
        };
        if let Some(own) = announced.iter().zip(receive_counts).enumerate().find_map(differs) {
            agreement.disagreement = own;
        }
        self.agree(call, bytemuck::bytes_of_mut(&mut agreement), &mut CountAgreement::combine, &options.due)?;
        if agreement.disagreement == NO_DISAGREEMENT {
            return Ok(agreement);
        }
        let [from, to, sent, expected] = agreement.disagreement;
        let rank = |number| usize::try_from(number).expect("ranks are numbered by usize");
        let (from, to) = (self.in_world(rank(from)), self.in_world(rank(to)));
        Err(Error::Disagreement { from, to, sent, expected })
    }
}

/// The combine function of schedules that only copy, which is never called.
fn nothing_to_combine(_: &mut [u8], _: &[u8]) {}

/// No disagreement. A disagreement is the sender, the receiver, the sent length and the expected length; this value is
/// greater than any of them.
const NO_DISAGREEMENT: [u64; 4] = [u64::MAX; 4];

/// The values of all ranks in an all_to_all of parts of different sizes.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct CountAgreement {
    /// The first one, in the order of its numbers.
    disagreement: [u64; 4],
    /// Elements of the largest part.
    largest: u64,
    /// Elements of all parts of all ranks.
    total: u64,
    /// Ranks that need messages: their caller forces an algorithm, or there is no library below their transport.
    by_messages: u64,
}

impl CountAgreement {
    /// Returns the values of a rank that sends these counts.
    fn of(send_counts: &[usize], by_messages: bool) -> Self {
        let counts = || send_counts.iter().map(|&count| count as u64);
        Self {
            disagreement: NO_DISAGREEMENT,
            largest: counts().max().unwrap_or(0),
            total: counts().sum(),
            by_messages: by_messages.into(),
        }
    }

    /// Combines the bytes of two.
    fn combine(into: &mut [u8], from: &[u8]) {
        let read = |bytes: &[u8]| bytemuck::pod_read_unaligned::<Self>(bytes);
        let (one, other) = (read(into), read(from));
        into.copy_from_slice(bytemuck::bytes_of(&Self {
            disagreement: one.disagreement.min(other.disagreement),
            largest: one.largest.max(other.largest),
            total: one.total.saturating_add(other.total),
            by_messages: one.by_messages.saturating_add(other.by_messages),
        }));
    }

    /// Returns the bytes of a rank's parts, as the mean of all ranks, and of the largest part, for a library below the
    /// transports of all ranks. All ranks get the same result.
    fn for_library(&self, element_size: usize, world_size: usize) -> Option<(usize, usize)> {
        if self.by_messages > 0 {
            return None;
        }
        let bytes = |elements: u64| usize::try_from(elements).ok()?.checked_mul(element_size);
        Some((bytes(self.total / world_size as u64)?, bytes(self.largest)?))
    }
}

/// Checks the counts, and that the input has the length of all sent parts. Returns the length of all received parts.
pub(crate) fn check_part_counts(
    world_size: usize,
    input: usize,
    send_counts: &[usize],
    receive_counts: &[usize],
) -> Result<usize> {
    let operation = Operation::AllToAll;
    let sent = total(world_size, operation, send_counts)?;
    let received = total(world_size, operation, receive_counts)?;
    check_length(operation, "input", sent, input)?;
    Ok(received)
}

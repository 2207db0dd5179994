//! Operations in which every rank sends a part to every other rank.

use dist_algos::direct::DirectCollective;
use dist_algos::{
    ALGORITHMS, Algorithm, CollectiveKind, CostModel, MessageAlgorithm, Order, Source, all_to_all,
};
use dist_transport::LazyDeadline;

use super::arithmetic::Arithmetic;
use super::direct::Input;
use super::plan_cache::{CallKey, Collective, ProgramKind};
use super::rank_layout::RankLayout;
use super::{CallOptions, Engine, copy, from_input, in_place, nothing_to_combine, room};
use crate::digest::digest;
use crate::{Call, Element, Error, Operation, Result};

impl Engine {
    pub(crate) fn all_to_all<T: Element>(
        &mut self,
        input: Input<'_, T>,
        output: &mut [T],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let part = self.check_divisible(Operation::AllToAll, input.len())?;
        Self::check_length(Operation::AllToAll, "output", input.len(), output.len())?;
        let world_size = self.world_size();
        let layout = RankLayout::even(part, world_size);
        let (input, ownership) = (input.elements(), input.ownership());
        let collective = Collective::Direct(DirectCollective::AllToAll);
        let key = CallKey::of::<T>(collective, part, size_of_val(input), options.sizes).on(ownership);
        match self.begin_collective(&key, |_| part * size_of::<T>(), options)? {
            ProgramKind::Direct { .. } => {
                let partition = layout.partition::<T>();
                self.run_directly(
                    (output, partition),
                    Some((input, partition)),
                    &Arithmetic::NONE,
                    &options.due,
                )
            }
            ProgramKind::Messages { .. } => {
                let (call, algorithm) = self.flat();
                self.deal(&call, algorithm, (input, &layout), (output, &layout), &options.due)
            }
        }
    }

    pub(crate) fn all_to_all_v<T: Element>(
        &mut self,
        input: &[T],
        send_counts: &[usize],
        output: &mut [T],
        receive_counts: &[usize],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let operation = Operation::AllToAll;
        let received = self.check_dealt(input.len(), send_counts, receive_counts)?;
        Self::check_length(operation, "output", received, output.len())?;
        let algorithm = match options.settings.forced(operation) {
            None => &all_to_all::WINDOWED,
            Some(Algorithm::Messages(algorithm)) if !self.forwards(algorithm) => algorithm,
            Some(algorithm) => return Err(Error::NeedsEvenParts { algorithm }),
        };
        // All ranks agree that their parts are uneven, and on nothing else.
        let sizes = digest((options.sizes != 0).then_some(options.sizes));
        let key = CallKey::of::<T>(Collective::Direct(DirectCollective::AllToAll), 0, 0, sizes);
        let call = self.call_of(operation, &key, options.settings.order);
        let call = self.begin(Call { algorithm: Some(Algorithm::Messages(algorithm)), ..call });
        self.compare_counts(&call, send_counts, receive_counts, options)?;
        let [sent, received] = [send_counts, receive_counts].map(RankLayout::counted);
        self.deal(&call, algorithm, (input, &sent), (output, &received), &options.due)
    }

    /// Returns the length that this rank receives if an input of this length is split by these counts.
    pub(crate) fn check_dealt(
        &self,
        input: usize,
        send_counts: &[usize],
        receive_counts: &[usize],
    ) -> Result<usize> {
        let operation = Operation::AllToAll;
        let sent = self.total(operation, send_counts)?;
        let received = self.total(operation, receive_counts)?;
        Self::check_length(operation, "input", sent, input)?;
        Ok(received)
    }

    fn deal<T: Element>(
        &mut self,
        call: &Call,
        algorithm: &MessageAlgorithm,
        (input, sent): (&[T], &RankLayout),
        (output, received): (&mut [T], &RankLayout),
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        if self.forwards(algorithm) {
            return self.pass_on(call, algorithm, (input, sent), output, due);
        }
        let own = self.rank().index();
        copy(&input[sent.range(own)], &mut output[received.range(own)]);
        let memory = from_input((input, sent.partition::<T>()), (output, received.partition::<T>()));
        self.run_in(call, algorithm.steps(self.rank(), 0), memory, &mut nothing_to_combine, due)
    }

    /// Returns `true` if an algorithm forwards parts through other ranks. All parts must then have the same length.
    fn forwards(&self, algorithm: &MessageAlgorithm) -> bool {
        algorithm.sends_from(self.world_size()) == Source::Buffer
    }

    /// Runs an algorithm that forwards parts through other ranks. Parts that travel together are stored in the
    /// order of that algorithm.
    fn pass_on<T: Element>(
        &mut self,
        call: &Call,
        algorithm: &MessageAlgorithm,
        (input, layout): (&[T], &RankLayout),
        output: &mut [T],
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let rank = self.rank();
        let mut memory = std::mem::take(&mut self.copy);
        let parts = room(&mut memory, input.len(), &mut *self.transport)?;
        for place in 0..rank.world_size() {
            copy(&input[layout.range(rank.plus(place).index())], &mut parts[layout.range(place)]);
        }
        let steps = algorithm.steps(rank, 0);
        let passed = in_place(parts, layout.partition::<T>());
        let done = self.run_in(call, steps, passed, &mut nothing_to_combine, due);
        for place in 0..rank.world_size() {
            copy(&parts[layout.range(place)], &mut output[layout.range(rank.minus(place).index())]);
        }
        self.copy = memory;
        done
    }

    /// Sends every rank the length that it is going to receive. If a rank expects another length, all ranks learn
    /// it.
    fn compare_counts(
        &mut self,
        call: &Call,
        send_counts: &[usize],
        receive_counts: &[usize],
        options: &CallOptions<'_>,
    ) -> Result<()> {
        let (rank, world_size) = (self.rank().index(), self.world_size());
        let sent: Vec<u64> = send_counts.iter().map(|&count| count as u64).collect();
        let mut announced = vec![0; world_size];
        let layout = RankLayout::even(1, world_size);
        // This choice is not part of a fingerprint, so it must not depend on the cost model of a rank.
        let model = &CostModel::default();
        let (collective, bytes) = (CollectiveKind::AllToAll, size_of_val(&*sent));
        let algorithm = ALGORITHMS.suggest(collective, self.placement, bytes, Order::Canonical, model);
        let algorithm = algorithm.expect("every operation has an algorithm for every world");
        self.deal(call, algorithm, (&sent, &layout), (&mut announced, &layout), &options.due)?;
        let differs = |(from, (&sent, &expected)): (usize, (&u64, &usize))| {
            (sent != expected as u64).then_some([from as u64, rank as u64, sent, expected as u64])
        };
        let own = announced.iter().zip(receive_counts).enumerate().find_map(differs);
        let mut first = own.unwrap_or(NO_DISAGREEMENT);
        self.agree(call, bytemuck::bytes_of_mut(&mut first), &mut keep_lesser, &options.due)?;
        if first == NO_DISAGREEMENT {
            return Ok(());
        }
        let [from, to, sent, expected] = first;
        let rank = |number| usize::try_from(number).expect("ranks are numbered by usize");
        let (from, to) = (self.in_world(rank(from)), self.in_world(rank(to)));
        Err(Error::Disagreement { from, to, sent, expected })
    }
}

/// A disagreement is a tuple of sender, receiver, sent length and expected length. This value is greater than any
/// disagreement.
const NO_DISAGREEMENT: [u64; 4] = [u64::MAX; 4];

fn keep_lesser(into: &mut [u8], from: &[u8]) {
    let read = |bytes: &[u8]| bytemuck::pod_read_unaligned::<[u64; 4]>(bytes);
    if read(from) < read(into) {
        into.copy_from_slice(from);
    }
}

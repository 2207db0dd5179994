//! The arithmetic of a reduction on one rank.

use dist_algos::{CollectiveKind, CostModel, Memory, Order, Partition, Placement};
use dist_transport::shm_group::CHANGED_MAX;
use dist_transport::{Combine, LazyDeadline};
use smallvec::SmallVec;

use super::plan_cache::PlanId;
use super::{CallOptions, Engine};
use crate::kernel::{combine_into_first, combines_at_once, sum_into_all, sum_into_first};
use crate::{Call, DType, Element, Error, ReduceOp, Result, combine};

/// The arithmetic of a reduction: prepares this rank's elements, combines pairs of elements and finishes the sums.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arithmetic {
    op: ReduceOp,
    factor: Option<f64>,
    divisor: Option<f64>,
}

impl Engine {
    /// Checks that the element type supports the reduction, and that the weight of a weighted mean is valid.
    pub(super) fn check_op<T: Element>(op: ReduceOp) -> Result<()> {
        if !op.supports(T::DTYPE) {
            return Err(Error::Unreducible { op: op.kind(), dtype: T::DTYPE });
        }
        match op {
            ReduceOp::WeightedMean(weight) if !(weight.is_finite() && weight >= 0.0) => {
                Err(Error::Weight { weight })
            }
            _ => Ok(()),
        }
    }

    /// Returns the arithmetic of the current call, which uses this plan. For a weighted mean, the weights of all ranks
    /// are added first.
    #[inline]
    pub(super) fn arithmetic<T: Element>(
        &mut self,
        plan: PlanId,
        op: ReduceOp,
        options: &CallOptions<'_>,
    ) -> Result<Arithmetic> {
        let (factor, divisor) = match op {
            #[allow(clippy::cast_precision_loss, reason = "a world has far fewer than 2^53 ranks")]
            ReduceOp::Mean => (None, Some(self.world_size() as f64)),
            ReduceOp::PreMulSum(factor) => (Some(factor), None),
            ReduceOp::WeightedMean(weight) => {
                let call = self.plan_cache.get(plan).call;
                let total = self.total_weight(&call, weight, &options.due)?;
                if !divides(total, T::DTYPE) {
                    return Err(Error::TotalWeight {
                        total,
                        dtype: options.element::<T>().dtype().unwrap_or(T::DTYPE),
                    });
                }
                (Some(weight), Some(total))
            }
            _ => (None, None),
        };
        Ok(Arithmetic { op, factor, divisor })
    }

    /// Returns the sum of all ranks' weights. The bits are the same on every rank.
    fn total_weight(&mut self, call: &Call, weight: f64, due: &LazyDeadline<'_>) -> Result<f64> {
        let mut total = [weight];
        let bytes = bytemuck::bytes_of_mut(&mut total);
        self.agree(call, bytes, &mut combine_bytes::<f64>(ReduceOp::Sum), due)?;
        Ok(total[0])
    }
}

impl Engine {
    /// Reduces one small value of every rank in canonical order, as part of the current call. All ranks get the
    /// result.
    pub(super) fn agree(
        &mut self,
        call: &Call,
        value: &mut [u8],
        combine: &mut Combine<'_>,
        due: &LazyDeadline<'_>,
    ) -> Result<()> {
        let world_size = self.world_size();
        let (kind, ranks) = (CollectiveKind::AllReduce, Placement::dedicated(world_size));
        let (order, model) = (Order::Canonical, &CostModel::default());
        let algorithm = self.algorithms.suggest(kind, ranks, value.len(), order, model);
        let algorithm = algorithm.expect("every operation has a canonical algorithm for every world");
        let partition =
            Partition::new(1, value.len(), algorithm.chunks(world_size)).expect("values have bytes");
        let memory = Memory::new(value, partition);
        self.run_in(call, algorithm.steps(self.rank(), 0), memory, combine, due)
    }
}

impl Arithmetic {
    /// The arithmetic of a call that only copies.
    pub(super) const NONE: Self = Self { op: ReduceOp::Sum, factor: None, divisor: None };

    /// Scales this rank's elements before they are combined with others.
    #[inline]
    pub(super) fn prepare<T: Element>(&self, own: &mut [T]) {
        if let (Some(factor), Some(scaling)) = (self.factor, T::SCALING) {
            (scaling.scale)(own, factor);
        }
    }

    /// Returns the function that combines two slices of elements.
    pub(super) fn combine<T: Element>(&self) -> impl FnMut(&mut [u8], &[u8]) + use<T> {
        combine_bytes::<T>(self.op)
    }

    /// Returns the function that sums the elements of `count` ranks in one loop, or `None` if there is no such
    /// loop. Sums of 4 and 8 ranks have one. All slices have the same length, and the sum is left in the first
    /// slice.
    #[inline(always)]
    pub(super) fn total<T: Element>(&self, count: usize) -> Option<impl FnMut(&mut [u8], &[&[u8]]) + use<T>> {
        (matches!(count, 4 | 8) && combines_at_once(self.op, count)).then_some(
            |first: &mut [u8], others: &[&[u8]]| {
                let mut elements: [&[T]; CHANGED_MAX] = [&[]; CHANGED_MAX];
                for (elements, bytes) in elements.iter_mut().zip(others) {
                    *elements = bytemuck::cast_slice(bytes);
                }
                sum_into_first(bytemuck::cast_slice_mut(first), &elements[..others.len()]);
            },
        )
    }

    /// Returns the function that reduces the elements of all ranks, given in rank order. All slices have the same
    /// length, and each of them holds the result afterwards.
    pub(super) fn complete<T: Element>(&self) -> impl FnMut(&mut [&mut [u8]]) {
        |all| {
            let mut all: SmallVec<[&mut [T]; CHANGED_MAX + 1]> =
                all.iter_mut().map(|one| bytemuck::cast_slice_mut(one)).collect();
            let at_once = combines_at_once(self.op, all.len());
            if at_once && self.divisor.is_none() {
                return sum_into_all(&mut all);
            }
            let (len, elements) = (all[0].len(), COMBINED_BYTES / all.len() / size_of::<T>());
            for start in (0..len).step_by(elements) {
                let range = start..len.min(start + elements);
                let mut all: SmallVec<[&mut [T]; CHANGED_MAX + 1]> =
                    all.iter_mut().map(|one| &mut one[range.clone()]).collect();
                // Two slices need one addition only. The second slice is overwritten below.
                if at_once && all.len() > 2 {
                    sum_into_all(&mut all);
                } else {
                    combine_into_first(self.op, &mut all);
                }
                let (sums, others) = all.split_first_mut().expect("this rank is one of them");
                self.finish(sums);
                others.iter_mut().for_each(|other| other.copy_from_slice(sums));
            }
        }
    }

    /// Returns `true` if `finish` changes the sums.
    pub(super) const fn finishes(&self) -> bool {
        self.divisor.is_some()
    }

    /// Finishes sums, for example divides them by the number of ranks. Only the rank that owns a sum calls this.
    #[inline]
    pub(super) fn finish<T: Element>(&self, sums: &mut [T]) {
        if let (Some(divisor), Some(scaling)) = (self.divisor, T::SCALING) {
            (scaling.divide)(sums, divisor);
        }
    }
}

/// Returns the function that combines two slices of elements, given as bytes.
fn combine_bytes<T: Element>(op: ReduceOp) -> impl FnMut(&mut [u8], &[u8]) {
    move |into, from| combine::<T>(op, bytemuck::cast_slice_mut(into), bytemuck::cast_slice(from))
}

/// Returns the neutral element of the operation, which is the result of a reduction of no elements.
pub(super) fn identity<T: Element>(op: ReduceOp) -> T {
    match op {
        ReduceOp::Product => T::one(),
        ReduceOp::Min => T::ORDERING.map_or_else(T::zero, |ordering| ordering.greatest),
        ReduceOp::Max => T::ORDERING.map_or_else(T::zero, |ordering| ordering.least),
        ReduceOp::And => T::BITWISE.map_or_else(T::zero, |bitwise| bitwise.ones),
        _ => T::zero(),
    }
}

/// Returns `true` if dividing by this sum of weights gives a meaningful result in the type's arithmetic.
#[allow(clippy::cast_possible_truncation, reason = "it asks what the rounding gives")]
fn divides(total: f64, dtype: DType) -> bool {
    let rounded = if dtype == DType::F64 { total } else { f64::from(total as f32) };
    rounded > 0.0 && rounded.is_finite()
}

/// Bytes of all ranks together that are combined at a time if there is no single loop for all ranks. The results are
/// then still in the cache when they are copied over the inputs.
const COMBINED_BYTES: usize = 16 << 10;

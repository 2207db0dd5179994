//! Typed collectives: element types, reduce operations and the kernels that combine buffers.

mod dtype;
mod kernel;
mod reduce_op;
pub use dtype::{DType, Element};
pub use kernel::{combine, divide_by_count};
pub use reduce_op::{ReduceOp, ReductionOrder};

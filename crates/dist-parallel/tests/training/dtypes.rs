//! Models of several types of numbers, trained by reporting gradients.

use dist_collectives::Communicator;
use dist_parallel::optim::{AdamW, AdamWOptions, Sgd, SgdOptions};
use dist_parallel::{Ddp, FloatType, ParamInfo};
use dist_transport::sim;
use rstest::rstest;

use crate::ddp::options;
use crate::plain::{Bag, bits};

fn infos() -> Vec<ParamInfo> {
    use FloatType::{Bf16, F16, F32, F64};
    let dtypes = [F32, Bf16, F64, F16, F32, Bf16, F16, F64];
    let info = |(index, dtype)| ParamInfo::new(format!("p{index}"), [index + 1, 3], dtype);
    dtypes.into_iter().enumerate().map(info).collect()
}

fn trained(ranks: usize, micro_batches: usize, bucket_bytes: usize) -> Vec<Vec<u32>> {
    let program = move |transport| {
        let comm = Communicator::new(transport);
        let model = Bag::new(infos(), comm.rank() as u64);
        let mut ddp = Ddp::new(comm, model, options(bucket_bytes)).unwrap();
        let mut adamw = AdamW::new(AdamWOptions { learning_rate: 0.05, ..AdamWOptions::default() }).unwrap();
        let mut sgd = Sgd::new(SgdOptions { learning_rate: 0.5, ..SgdOptions::default() }).unwrap();
        for step in 0..3 {
            let report = |model: &mut Bag, index, ready: &mut dist_parallel::model::Ready<'_>| {
                model.report(1000 * step + index, ready)
            };
            ddp.step_with(micro_batches, report).unwrap();
            ddp.update(if step == 1 { &mut sgd } else { &mut adamw }).unwrap();
        }
        bits(ddp.model())
    };
    sim::run(1, ranks, program).results
}

#[rstest]
#[case(2, 8)]
#[case(4, 8)]
#[case(3, 12)]
fn every_type_of_number_trains_the_same_bits_on_any_number_of_ranks(
    #[case] ranks: usize,
    #[case] micro_batches: usize,
    #[values(0, 40, 1 << 20)] bucket_bytes: usize,
) {
    let alone = trained(1, micro_batches, 1 << 20).remove(0);
    assert_ne!(alone, bits(&Bag::new(infos(), 0)));
    assert_eq!(trained(ranks, micro_batches, bucket_bytes), vec![alone; ranks]);
}

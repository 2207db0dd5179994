//! The predicted duration of a direct schedule equals its duration on the simulated network, to the nanosecond.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::time::Duration;

use dist_algos::direct::{
    DirectCollective, DirectCosts, DirectMemory, DirectPlan, ExposedMemory, OwnMemory, ReductionKernel,
    RemoteAccess, exposed_memory, one_shot, run, signal_and_wait,
};
use dist_algos::{ALGORITHMS, Partition, Scratch, Source};
use dist_transport::conformance::Unchecked;
use dist_transport::shm_group::{ExposedRegion, GroupLayout, MemoryCosts, Reach};
use dist_transport::{Fingerprint, Owned, Transport, sim};
use rstest::rstest;

const SHARED: GroupLayout = GroupLayout::on_host(Reach::Write);

/// Costs that are all different and not whole nanoseconds.
const PACE: DirectCosts = DirectCosts {
    costs: MemoryCosts {
        signal_ps: 20_300,
        wait_ps: 7_700,
        copied_byte_ps: 130,
        viewed_byte_ps: 210,
        attach_ps: 400_100,
        attached_byte_ps: 90,
    },
    notice: Duration::from_nanos(75),
    piece_bytes: 256,
};

/// Returns the duration on the simulated network with this seed.
fn simulated(plan: DirectPlan, seed: u64, partition: Partition<'static>) -> Duration {
    let link = sim::Link::new(PACE.notice, u64::MAX);
    let network = sim::Network::new(plan.world_size()).with_seed(seed).with_memory_link(link);
    let network = network.with_shared_memory_costs(PACE.costs);
    let outcome = network.run(move |mut transport| {
        let (rank, deadline) = (transport.rank(), transport.runtime().deadline(Duration::from_secs(60)));
        transport.begin(&Fingerprint([1; 48]));
        let input = vec![1_u8; partition.bytes()];
        let mut buffer = input.clone();
        let input = (plan.collective().source() == Source::Input).then_some((&*input, partition));
        let (program, steps) = ((&plan, rank), plan.schedule(rank));
        let (scratch, due) = (&mut Scratch::new(), &deadline.into());
        let mut access = Unchecked::simulated(&mut transport, due).unwrap().unwrap();
        if plan.is_fused() {
            let arithmetic = (|_: &mut [u8], _: &[u8]| (), Some(|_: &mut [u8], _: &[&[u8]]| ()));
            signal_and_wait(&mut access, program, &mut buffer, arithmetic, scratch, due).unwrap();
            return;
        }
        let lent = Owned::from(buffer.clone());
        let writes = plan.algorithm().remote_access == RemoteAccess::Write;
        let part = partition.range(if writes { rank.index() } else { 0 });
        let own = match writes {
            true => OwnMemory::Lent { len: buffer.len(), start: part.start, part: &mut buffer[part] },
            false => OwnMemory::Borrowed(&mut buffer),
        };
        let memory = &mut DirectMemory { own, partition, input, piece_bytes: PACE.piece_bytes };
        let kernel =
            &mut ReductionKernel { combine: &mut |_, _| (), finish: &mut |_| (), complete: &mut |_| () };
        let exposes = match exposed_memory(&plan, rank, memory) {
            ExposedMemory::Nothing => ExposedRegion::Nothing,
            ExposedMemory::Read(bytes) => ExposedRegion::Read(bytes),
            ExposedMemory::OwnMemory => ExposedRegion::Write(lent.lend()),
        };
        access.enter(plan.signals(), plan.use_of_slots(), exposes, due).unwrap();
        run(&mut access, program, steps, memory, kernel, scratch, due).unwrap();
    });
    outcome.elapsed
}

#[rstest]
fn a_schedule_takes_as_long_as_predicted(#[values(2, 3, 4, 5, 8)] world_size: usize) {
    let algorithms = |collective: DirectCollective| {
        let served = ALGORITHMS.direct().filter(move |algorithm| algorithm.collective == collective.kind());
        served.map(move |algorithm| (collective, algorithm))
    };
    let all = DirectCollective::all(world_size / 2).into_iter().flat_map(algorithms);
    for (collective, algorithm) in all {
        for len in [0, 1, 40, 1000, 10_000] {
            let partition = Partition::new(len, 1, algorithm.parts(world_size)).unwrap();
            let plan = DirectPlan::new(
                (collective, algorithm),
                world_size,
                partition.chunk_bytes_max(),
                2048,
                SHARED,
            )
            .unwrap();
            let predicted = plan.duration(partition, Some(partition), &PACE);
            for seed in [0, 1] {
                let took = simulated(plan, seed, partition);
                assert_eq!(took, predicted, "{collective:?} {algorithm:?}, {len} bytes, {world_size} ranks");
            }
        }
    }
}

#[test]
fn a_barrier_takes_a_signal_and_its_notice() {
    let partition = Partition::new(0, 1, 1).unwrap();
    let barrier = |ranks| {
        DirectPlan::new((DirectCollective::Barrier, &one_shot::BARRIER), ranks, 0, 0, SHARED).unwrap()
    };
    let time = |ranks| barrier(ranks).duration(partition, None, &PACE);
    assert_eq!(time(1), Duration::from_nanos(20));
    assert_eq!(time(2), Duration::from_nanos(20 + 75));
}

//! The arithmetic of resharding, with any sizes beyond one block of a checksum.

use proptest::prelude::*;
use std::path::Path;

use crate::checkpoint::disk::Disk;
use crate::checkpoint::fetch::{Wanted, fetch};
use crate::checkpoint::index::{CHECKED_BYTES, Index, StoredTensor, TensorName};
use crate::checkpoint::load::{Allowed, Checkpoint};
use crate::checkpoint::part::{self, Entry};
use crate::checkpoint::save;
use crate::{FloatType, ParamInfo};

/// Writes tensors of these lengths, divided into `files` files as by this number of ranks.
fn written(directory: &Path, lens: &[usize], files: usize) -> Index {
    let total: usize = lens.iter().sum();
    let parts = (0..files).map(|file| {
        let (from, to) = (file * total / files, (file + 1) * total / files);
        let mut entries = Vec::new();
        let mut start = 0;
        for (number, &len) in lens.iter().enumerate() {
            let (first, last) = (from.max(start), to.min(start + len));
            if first < last {
                entries.push(Entry {
                    tensor: TensorName::parameter(&number.to_string()),
                    dtype: FloatType::F32,
                    shape: vec![len],
                    offset: first - start,
                    len: last - first,
                    source: number,
                });
            }
            start += len;
        }
        let path = directory.join(format!("{file}.safetensors"));
        let (file, tensors) = part::write(&Disk::default(), &path, &entries, |entry, write| {
            write(bytemuck::cast_slice(&values(entry.source, entry.offset, entry.len)))
        })
        .unwrap();
        part::PartMeta { file, tensors }
    });
    let parts: Vec<part::PartMeta> = parts.collect();
    let infos: Vec<ParamInfo> = lens
        .iter()
        .enumerate()
        .map(|(number, &len)| ParamInfo::new(number.to_string(), [len], FloatType::F32))
        .collect();
    let files = parts.iter().map(|part| part.file.clone()).collect();
    let tensors = save::merge(&infos, parts);
    let index =
        Index { step: 0, steps: 0, optimizer: None, rank_optimizer: None, files, tensors, state: None };
    index.check(directory).unwrap();
    index
}

fn values(tensor: usize, offset: usize, len: usize) -> Vec<f32> {
    (offset..offset + len).map(|index| (index * 31 + tensor) as f32).collect()
}

/// Returns lengths around the block size, which are small enough to write often.
fn any_len() -> impl Strategy<Value = usize> {
    let block = CHECKED_BYTES / 4;
    prop_oneof![0..9_usize, block - 2..block + 3, 2 * block - 1..2 * block + 9]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_range_of_any_tensor_is_read_from_any_files(
        lens in prop::collection::vec(any_len(), 1..5),
        files in 1..6_usize,
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..5),
        world_size in 1..4_usize,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let index = written(directory.path(), &lens, files);
        let names: Vec<TensorName> =
            (0..lens.len()).map(|number| TensorName::parameter(&number.to_string())).collect();
        let stored = |name| -> &StoredTensor { index.tensors.iter().find(|tensor| &tensor.name == name).unwrap() };
        let ranges: Vec<(usize, usize, usize)> = cuts
            .iter()
            .enumerate()
            .map(|(number, (one, other))| {
                let tensor = number % lens.len();
                let [one, other] = [one, other].map(|place| place.index(lens[tensor] + 1));
                (tensor, one.min(other), one.abs_diff(other))
            })
            .collect();
        let mut wanted: Vec<Wanted<'_>> =
            ranges.iter().map(|&(tensor, offset, len)| Wanted::new(stored(&names[tensor]), offset, len)).collect();
        let disk = Disk::default();
        let path = directory.path().join("index");
        let checkpoint = Checkpoint { disk: &disk, path: &path, index: &index, allowed: &Allowed::default() };
        fetch(checkpoint, &mut wanted, 0, world_size).unwrap();
        for ((tensor, offset, len), wanted) in ranges.into_iter().zip(wanted) {
            let expected = values(tensor, offset, len);
            prop_assert_eq!(&wanted.bytes, bytemuck::cast_slice::<f32, u8>(&expected));
        }
    }
}

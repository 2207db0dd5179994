//! A number that represents a list of numbers in a call.

/// Returns the hash of a list: FNV-1a over whole numbers, mixed at the end; never 0. Two different lists have equal
/// digests with probability 2⁻⁶⁴.
pub(crate) fn digest(numbers: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for number in numbers {
        hash = (hash ^ number).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
    }
    (hash ^ (hash >> 32)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lists_have_digests_of_their_own() {
        let mut lists: Vec<Vec<u64>> = vec![vec![]];
        let mut start = 0;
        for _ in 0..3 {
            let end = lists.len();
            for index in start..end {
                for number in [0, 1, 2, 3, 64, 1000, u64::MAX] {
                    lists.push([&*lists[index], &[number]].concat());
                }
            }
            start = end;
        }
        let mut digests: Vec<u64> = lists.iter().map(|list| digest(list.iter().copied())).collect();
        assert!(digests.iter().all(|&digest| digest != 0));
        digests.sort_unstable();
        digests.dedup();
        assert_eq!(digests.len(), lists.len());
    }
}

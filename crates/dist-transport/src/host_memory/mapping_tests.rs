//! Tests of segments that are mapped twice.

use rstest::rstest;

use super::*;

/// Returns bytes that no test writes meanwhile.
fn bytes(mapping: &Mapping, offset: usize, len: usize) -> &[u8] {
    // SAFETY: the tests write before they read, on one thread.
    unsafe { mapping.bytes(offset, len) }
}

/// Writes at a time without readers.
fn copy_in(mapping: &Mapping, offset: usize, bytes: &[u8]) {
    // SAFETY: as above.
    unsafe { mapping.copy_in(offset, bytes) };
}

const LEN: usize = 3 * 4096;

#[test]
fn bytes_written_through_one_mapping_are_read_through_the_other() {
    let (file, one) = Mapping::create(LEN).unwrap();
    let other = Mapping::open(&file, LEN).unwrap().expect("it is of this size");
    copy_in(&one, 100, b"hello");
    // SAFETY: only this thread accesses them.
    unsafe { one.fill(200, 2, &mut |bytes| bytes.copy_from_slice(b"ab")) };
    assert_eq!((bytes(&other, 100, 5), bytes(&other, 200, 2)), (&b"hello"[..], &b"ab"[..]));
    assert_eq!(other.find(&bytes(&other, 100, 5)[1..]), Some(101));
    assert_eq!(other.find(bytes(&one, 100, 5)), None);
}

/// Returns the number of bytes of a segment that have pages.
fn allocated(file: &OwnedFd) -> usize {
    usize::try_from(rustix::fs::fstat(file).unwrap().st_blocks * 512).unwrap()
}

#[test]
fn reserved_pages_are_allocated_and_keep_their_bytes() {
    let (file, mapping) = Mapping::create(LEN).unwrap();
    copy_in(&mapping, 4096, b"hello");
    assert_eq!(allocated(&file), 4096);
    mapping.reserve(4096, 2 * 4096).unwrap();
    assert_eq!(allocated(&file), 2 * 4096);
    assert_eq!(bytes(&mapping, 4096, 5), b"hello");
    mapping.reserve_file(&file).unwrap();
    assert_eq!(allocated(&file), LEN);
}

#[test]
fn several_places_are_changed_at_once() {
    let (_file, one) = Mapping::create(LEN).unwrap();
    let (_file, other) = Mapping::create(LEN).unwrap();
    let places = [(&one, 100), (&other, 100), (&one, 102), (&one, 98)];
    let fill = &mut |all: &mut [&mut [u8]]| {
        all.iter_mut().zip(1..).for_each(|(bytes, value)| bytes.fill(value));
    };
    // SAFETY: only this thread accesses them.
    unsafe { change(places.into_iter(), 2, fill) };
    assert_eq!(
        (bytes(&one, 97, 8), bytes(&other, 99, 4)),
        (&[0, 4, 4, 1, 1, 3, 3, 0][..], &[0, 2, 2, 0][..])
    );
}

#[test]
#[should_panic(expected = "overlap")]
fn places_that_overlap_are_not_changed_at_once() {
    let (_file, mapping) = Mapping::create(LEN).unwrap();
    let places = [(&mapping, 100), (&mapping, 101)].into_iter();
    // SAFETY: only this thread accesses them.
    unsafe { change(places, 2, &mut |_| panic!("they are not given")) };
}

#[test]
fn short_turns_change_nothing_else_of_how_a_thread_is_scheduled() {
    // Policy, priority and nice value: fields 41, 40 and 19 of the thread's statistics.
    let scheduled = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields: Vec<String> = stat.rsplit(") ").next().unwrap().split(' ').map(str::to_owned).collect();
        [41, 40, 19].map(|field| fields[field - 3].clone())
    };
    let before = scheduled();
    request_short_slices(Duration::from_micros(100)).unwrap();
    assert_eq!(scheduled(), before);
}

#[test]
fn a_non_temporal_copy_copies_all_bytes_and_no_others() {
    let bytes: Vec<u8> = (0..=255).cycle().take(1000).collect();
    for range in [0..0, 0..5, 0..64, 3..1000, 17..18, 16..999] {
        let mut memory = vec![7; 1000];
        copy_non_temporal(&bytes[..range.len()], &mut memory[range.clone()]);
        assert!(memory[range.clone()] == bytes[..range.len()], "{range:?}");
        let beside = memory[..range.start].iter().chain(&memory[range.end..]);
        assert!(beside.clone().all(|&byte| byte == 7), "{range:?}");
    }
}

#[rstest]
fn a_copy_to_a_reader_copies_all_bytes_and_no_others(
    #[values(0, 1023, 1024, 1025, 4095, 4096)] len: usize,
    #[values(0, 1, 63)] ahead: usize,
    #[values(copy_to_reader, string::copy)] copy: fn(&[u8], &mut [u8]),
) {
    let bytes: Vec<u8> = (0..=250).cycle().take(len).collect();
    let mut memory = vec![0xff; len + 128];
    copy(&bytes, &mut memory[ahead..ahead + len]);
    assert!(memory[ahead..ahead + len] == bytes);
    assert!(memory[..ahead].iter().chain(&memory[ahead + len..]).all(|&byte| byte == 0xff));
}

#[rstest]
#[should_panic(expected = "length")]
fn a_copy_to_a_reader_needs_equal_lengths(
    #[values(1024, 4096)] len: usize,
    #[values(copy_to_reader, string::copy)] copy: fn(&[u8], &mut [u8]),
) {
    copy(&vec![0; len], &mut vec![0; len + 1]);
}

#[test]
fn a_file_that_could_shrink_is_not_mapped() {
    let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, LEN as u64).unwrap();
    assert!(Mapping::open(&file, LEN).unwrap().is_none());
}

#[test]
fn a_file_of_another_size_is_not_mapped() {
    let (file, _mapping) = Mapping::create(LEN).unwrap();
    assert!(Mapping::open(&file, LEN + 4096).unwrap().is_none());
}

#[test]
#[should_panic(expected = "outside the segment")]
fn nothing_outside_a_segment_is_reached() {
    let (_file, mapping) = Mapping::create(LEN).unwrap();
    bytes(&mapping, LEN - 1, 2);
}

#[test]
fn a_region_has_its_bytes() {
    let (_file, mapping) = Mapping::create(LEN).unwrap();
    // SAFETY: nothing else reaches the segment.
    let mut region = unsafe { Region::new(Arc::new(mapping), 64, LEN - 64) };
    region.bytes_mut()[..5].copy_from_slice(b"hello");
    assert_eq!((&region.bytes()[..5], region.bytes().len()), (&b"hello"[..], LEN - 64));
}

#[test]
fn large_segments_have_different_cache_colours() {
    let hash = |address: usize| {
        let pairs = [(12, 27), (13, 26), (14, 25), (15, 20), (16, 21), (17, 22), (18, 23), (19, 24)];
        pairs.map(|(low, high)| (address >> low ^ address >> high) & 1)
    };
    let len = HASHED_BYTES;
    let (file, first) = Mapping::create(len).unwrap();
    let others = [0, 5 * 4096, HASHED_BYTES].map(|more| Mapping::create(len + more).unwrap().1);
    let again = Mapping::open(&file, len).unwrap().expect("it is of this size");
    let all: Vec<usize> =
        others.iter().chain([&first, &again]).map(|one| bytes(one, 0, len).as_ptr().addr()).collect();
    for offset in (0..len).step_by(1 << 20).flat_map(|mib| [mib, mib + 4096]) {
        let mut hashes: Vec<_> = all.iter().map(|start| hash(start + offset)).collect();
        hashes.sort_unstable();
        assert!(hashes.is_sorted_by(|left, right| left < right), "{all:x?} at {offset:x}");
    }
}

#[test]
fn a_large_segment_is_mapped_whole_and_found_again() {
    let len = HASHED_BYTES + 4096;
    let (file, one) = Mapping::create(len).unwrap();
    let other = Mapping::open(&file, len).unwrap().expect("it is of this size");
    for offset in [0, len - 5] {
        copy_in(&one, offset, b"hello");
        assert_eq!(bytes(&other, offset, 5), b"hello");
        assert_eq!(other.find(bytes(&other, offset, 5)), Some(offset));
    }
}

#[test]
#[cfg(target_pointer_width = "64")]
fn addresses_are_given_back() {
    // More than 2⁴⁸ in all.
    for _ in 0..10_000 {
        Space::reserve(1 << 35).unwrap();
    }
}

//! Comparison of models and settings between ranks.
//!
//! Each rank hashes its list of parameters. If the hashes differ, a binary search finds the first parameter that
//! differs: each step compares the hashes of a prefix of the list. All ranks see the same hashes, so they take the
//! same steps and get the same result.

use std::fmt;

use bytemuck::Pod;
use dist_collectives::{Communicator, Element};

use crate::{Error, ParamInfo, Result};

/// The name and the value of a setting, as text.
pub(crate) type Setting = (String, String);

/// Returns a setting with a name and a value.
pub(crate) fn setting(name: &str, value: impl fmt::Debug) -> Setting {
    (name.to_owned(), format!("{value:?}"))
}

/// Returns an error unless every rank has these parameters and settings, the settings in the same order.
pub(crate) fn check(comm: &mut Communicator, infos: &[ParamInfo], settings: &[Setting]) -> Result<()> {
    let prefixes = prefixes(infos);
    let mine = [fingerprint(settings), infos.len() as u64, prefixes[infos.len()]];
    let all = gather(comm, mine)?;
    if let Some(rank) = all.iter().position(|theirs| theirs[0] != all[0][0]) {
        let own = comm.rank();
        let found = first_difference(&mut [comm], own, settings)?;
        let Difference { rank, setting, there, on_first } = found.unwrap_or(Difference::unknown(rank));
        return Err(Error::OptionsDiffer { rank, setting, there, on_rank_0: on_first });
    }
    if all.iter().all(|theirs| *theirs == all[0]) {
        return Ok(());
    }
    let shortest = all.iter().map(|theirs| theirs[1]).min().expect("this rank is one");
    let shortest = usize::try_from(shortest).expect("this rank's list is no shorter");
    // The first `same` parameters agree, the first `differ` do not, if all ranks have `differ` parameters.
    let (mut same, mut differ) = (0, shortest + 1);
    while differ - same > 1 {
        let middle = usize::midpoint(same, differ);
        let all = gather(comm, [prefixes[middle]])?;
        if all.iter().all(|theirs| *theirs == all[0]) {
            same = middle;
        } else {
            differ = middle;
        }
    }
    Err(describe(comm, infos.get(same), same)?)
}

/// A setting in which a rank differs from the first one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The number that the rank passed.
    pub(crate) rank: usize,
    pub(crate) setting: String,
    pub(crate) there: String,
    pub(crate) on_first: String,
}

impl Difference {
    fn unknown(rank: usize) -> Self {
        let unknown = || "unknown".to_owned();
        Self { rank, setting: "a setting".to_owned(), there: unknown(), on_first: unknown() }
    }
}

/// Returns the first difference between the settings of any rank and those of the first one, the same on all ranks.
/// All of them call this, with a number of theirs. With several groups, such as those of a pipeline mesh, a rank's
/// number in each is one coordinate. The first rank has number 0 in each.
pub(crate) fn first_difference(
    groups: &mut [&mut Communicator],
    number: usize,
    own: &[Setting],
) -> Result<Option<Difference>> {
    let mut bytes = serde_json::to_vec(own).expect("it is made of text");
    for group in &mut *groups {
        let mut len = [bytes.len() as u64];
        group.broadcast(&mut len, 0).map_err(Error::communication)?;
        bytes.resize(usize::try_from(len[0]).expect("a rank has as much in memory"), 0);
        group.broadcast(&mut bytes, 0).map_err(Error::communication)?;
    }
    let first: Vec<Setting> = serde_json::from_slice(&bytes).unwrap_or_default();
    let differs = (0..own.len().max(first.len())).find(|&index| own.get(index) != first.get(index));
    let record = differs.map_or([0; 512], |index| differing(number, own.get(index), first.get(index)));
    let all = gather_over(groups.iter_mut().map(|group| &mut **group), record.to_vec())?;
    Ok(all.chunks(512).find_map(read_differing))
}

/// Encodes a difference in a fixed size: texts, each terminated by a zero.
fn differing(number: usize, own: Option<&Setting>, first: Option<&Setting>) -> Record {
    let (mut record, mut end) = ([0; 512], 0);
    let value =
        |setting: Option<&Setting>| setting.map_or_else(|| "missing".to_owned(), |(_, value)| value.clone());
    // If both have a setting at this position but different ones, each lacks the other's.
    let (name, own, first) = match (own, first) {
        (Some((name, _)), Some((other, _))) if name != other => (name, value(own), "missing".to_owned()),
        (Some((name, _)), _) | (None, Some((name, _))) => (name, value(own), value(first)),
        (None, None) => return record,
    };
    for text in [&number.to_string(), &shortened(name, 150), &shortened(&own, 150), &shortened(&first, 150)] {
        record[end..end + text.len()].copy_from_slice(text.as_bytes());
        end += text.len() + 1;
    }
    record
}

fn read_differing(record: &[u8]) -> Option<Difference> {
    let mut texts = record.split(|&byte| byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
    let rank = texts.next()?.parse().ok()?;
    Some(Difference { rank, setting: texts.next()?, there: texts.next()?, on_first: texts.next()? })
}

/// Returns the error for parameter `index`, the first that differs.
fn describe(comm: &mut Communicator, mine: Option<&ParamInfo>, index: usize) -> Result<Error> {
    let all: Vec<Description> = gather(comm, record(mine))?.iter().map(read).collect();
    let first = &all[0];
    let rank = all.iter().position(|other| other != first).unwrap_or_default();
    let other = &all[rank];
    Ok(Error::ModelsDiffer {
        parameter: first.name.as_ref().or(other.name.as_ref()).cloned().unwrap_or_default(),
        index,
        on_rank_0: first.meta.clone(),
        rank,
        on_rank: other.meta.clone(),
    })
}

/// Gathers the inputs of all ranks, in rank order.
pub(crate) fn gather<T: Element, const N: usize>(comm: &mut Communicator, mine: [T; N]) -> Result<Vec<[T; N]>>
where
    [T; N]: Pod,
{
    let mut all = vec![mine; comm.world_size()];
    comm.all_gather(&mine, bytemuck::cast_slice_mut(&mut all)).map_err(Error::communication)?;
    Ok(all)
}

/// Gathers the values of all ranks of several groups, for example those of a pipeline mesh. The ranks of the first group
/// come one after the other.
pub(crate) fn gather_over<'a, T: Element>(
    groups: impl IntoIterator<Item = &'a mut Communicator>,
    own: Vec<T>,
) -> Result<Vec<T>> {
    groups.into_iter().try_fold(own, |own, group| {
        let mut all = vec![T::zeroed(); own.len() * group.world_size()];
        group.all_gather(&own, &mut all).map_err(Error::communication)?;
        Ok(all)
    })
}

/// Returns for each length the hash of the prefix of the list.
fn prefixes(infos: &[ParamInfo]) -> Vec<u64> {
    let mut last = hash([]);
    let mut hashes = vec![last];
    for info in infos {
        // The byte 255 occurs in no text, so it terminates a name.
        last = hash_more(last, info.to_string().bytes().chain([255]));
        hashes.push(last);
    }
    hashes
}

/// Returns a hash of settings that is the same on every rank and with every compiler.
pub(crate) fn fingerprint(settings: &(impl fmt::Debug + ?Sized)) -> u64 {
    hash(format!("{settings:?}").bytes())
}

/// Returns a hash that is the same on every rank.
pub(crate) fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    hash_more(0xcbf2_9ce4_8422_2325, bytes)
}

/// Continues a hash with more bytes (FNV-1a).
pub(crate) fn hash_more(hash: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The description of a parameter in a fixed size: the name, a zero, shape and type, zeros.
type Record = [u8; 512];

#[derive(Debug, Clone, PartialEq, Eq)]
struct Description {
    /// `None` if the rank has no such parameter.
    name: Option<String>,
    meta: String,
}

fn record(info: Option<&ParamInfo>) -> Record {
    let mut record = [0; 512];
    let Some(info) = info else { return record };
    let name = shortened(&info.name, 200);
    let meta = shortened(&info.to_string(), 300);
    record[..name.len()].copy_from_slice(name.as_bytes());
    record[name.len() + 1..][..meta.len()].copy_from_slice(meta.as_bytes());
    record
}

fn read(record: &Record) -> Description {
    let mut texts = record.split(|&byte| byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
    let (name, meta) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
    if meta.is_empty() {
        return Description { name: None, meta: "missing".to_owned() };
    }
    Description { name: Some(name), meta }
}

/// Shortens a text to at most `max` bytes. It keeps the end, because that is the part in which names differ.
fn shortened(text: &str, max: usize) -> String {
    let text = text.replace('\0', "?");
    let start = text.ceil_char_boundary(text.len().saturating_sub(max));
    text[start..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FloatType;

    #[test]
    fn a_record_is_read_back() {
        let mut info = ParamInfo::new("blocks.3.weight", [4, 8], FloatType::Bf16);
        info.trainable = false;
        let read_back = read(&record(Some(&info)));
        assert_eq!(read_back.name.as_deref(), Some("blocks.3.weight"));
        assert_eq!(read_back.meta, "blocks.3.weight [4, 8] bf16, frozen");
        assert_eq!(read(&record(None)), Description { name: None, meta: "missing".to_owned() });
    }

    #[test]
    fn a_difference_is_read_back() {
        let rate = |value: f64| setting("the learning rate", value);
        let read_back = |own: Option<&Setting>, first: Option<&Setting>| {
            let found = read_differing(&differing(12, own, first)).unwrap();
            (found.rank, found.setting, found.there, found.on_first)
        };
        let expected =
            |there: &str, first: &str| (12, "the learning rate".into(), there.into(), first.into());
        assert_eq!(read_back(Some(&rate(0.1)), Some(&rate(0.2))), expected("0.1", "0.2"));
        assert_eq!(read_back(Some(&rate(0.1)), None), expected("0.1", "missing"));
        assert_eq!(read_back(None, Some(&rate(0.2))), expected("missing", "0.2"));
        assert_eq!(read_back(Some(&rate(0.1)), Some(&setting("beta", 0.2))), expected("0.1", "missing"));
        assert_eq!(read_differing(&differing(3, None, None)), None);
        let long = setting(&"é".repeat(400), "x".repeat(400));
        assert!(read_back(Some(&long), None).1.starts_with('é'));
    }

    #[test]
    fn a_long_name_keeps_its_end() {
        let info = ParamInfo::new(format!("{}weight", "block.é".repeat(100)), [2], FloatType::F32);
        let read_back = read(&record(Some(&info)));
        assert!(read_back.name.unwrap().ends_with("éweight"));
        assert!(read_back.meta.ends_with("éweight [2] f32"));
    }

    #[test]
    fn hashes_of_beginnings_differ_from_the_first_difference_on() {
        let infos: Vec<ParamInfo> =
            ["a", "b", "c"].map(|name| ParamInfo::new(name, [2], FloatType::F32)).into();
        let mut others = infos.clone();
        others[1].shape = vec![3];
        let equal: Vec<bool> = prefixes(&infos).iter().zip(&prefixes(&others)).map(|(a, b)| a == b).collect();
        assert_eq!(equal, [true, true, false, false]);
    }
}

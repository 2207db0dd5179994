//! Whether all ranks train the same model.
//!
//! Each rank hashes its list of parameters. When the hashes differ, the first parameter that differs is searched
//! for by halves, each time comparing the hashes of a beginning of the list: all ranks see the same hashes, so all
//! take the same turns and end with the same answer.

use std::fmt;

use bytemuck::Pod;
use dist_collectives::{Communicator, Element};

use crate::{Error, ParamInfo, Result};

/// Checks that every rank has these parameters and settings; the latter as numbers of any meaning.
pub(crate) fn check(comm: &mut Communicator, infos: &[ParamInfo], settings: [u64; 2]) -> Result<()> {
    let prefixes = prefixes(infos);
    let mine = [settings[0], settings[1], infos.len() as u64, prefixes[infos.len()]];
    let all = gather(comm, mine)?;
    if let Some(rank) = all.iter().position(|theirs| theirs[..2] != all[0][..2]) {
        return Err(Error::OptionsDiffer { rank });
    }
    if all.iter().all(|theirs| *theirs == all[0]) {
        return Ok(());
    }
    let shortest = all.iter().map(|theirs| theirs[2]).min().expect("this rank is one");
    let shortest = usize::try_from(shortest).expect("this rank's list is no shorter");
    // The first `same` parameters agree, the first `differ` do not, if all ranks have so many.
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

/// The error for parameter `index`, the first that differs.
fn describe(comm: &mut Communicator, mine: Option<&ParamInfo>, index: usize) -> Result<Error> {
    let all: Vec<Description> = gather(comm, record(mine))?.iter().map(read).collect();
    let first = &all[0];
    let rank = all.iter().position(|other| other != first).unwrap_or_default();
    let other = &all[rank];
    Ok(Error::ModelsDiffer {
        parameter: first.name.as_ref().or(other.name.as_ref()).cloned().unwrap_or_default(),
        index,
        on_rank_0: first.look.clone(),
        rank,
        on_rank: other.look.clone(),
    })
}

/// The inputs of all ranks, in rank order.
pub(crate) fn gather<T: Element, const N: usize>(comm: &mut Communicator, mine: [T; N]) -> Result<Vec<[T; N]>>
where
    [T; N]: Pod,
{
    let mut all = vec![mine; comm.world_size()];
    comm.all_gather(&mine, bytemuck::cast_slice_mut(&mut all)).map_err(Error::communication)?;
    Ok(all)
}

/// For each number of parameters, the hash of that many.
fn prefixes(infos: &[ParamInfo]) -> Vec<u64> {
    let mut last = hash([]);
    let mut hashes = vec![last];
    for info in infos {
        // The byte 255 is in no text: what follows it cannot be taken for a longer name.
        last = hash_more(last, info.to_string().bytes().chain([255]));
        hashes.push(last);
    }
    hashes
}

/// A number that differs where settings do, the same on every rank, whichever compiler built it.
pub(crate) fn fingerprint(settings: &(impl fmt::Debug + ?Sized)) -> u64 {
    hash(format!("{settings:?}").bytes())
}

/// A hash that is the same on every rank.
fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    hash_more(0xcbf2_9ce4_8422_2325, bytes)
}

/// The hash of what was hashed before and these bytes (FNV-1a).
fn hash_more(hash: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// What a rank says of its parameter, in a size that needs no agreement: the name, a zero, how it looks, zeros.
type Record = [u8; 512];

#[derive(Debug, Clone, PartialEq, Eq)]
struct Description {
    /// `None` if the rank has no such parameter.
    name: Option<String>,
    look: String,
}

fn record(info: Option<&ParamInfo>) -> Record {
    let mut record = [0; 512];
    let Some(info) = info else { return record };
    let name = shortened(&info.name, 200);
    let look = shortened(&info.to_string(), 300);
    record[..name.len()].copy_from_slice(name.as_bytes());
    record[name.len() + 1..][..look.len()].copy_from_slice(look.as_bytes());
    record
}

fn read(record: &Record) -> Description {
    let mut texts = record.split(|&byte| byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
    let (name, look) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
    if look.is_empty() {
        return Description { name: None, look: "missing".to_owned() };
    }
    Description { name: Some(name), look }
}

/// At most `max` bytes of a text, the end where something must go: that is where names differ.
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
        assert_eq!(read_back.look, "blocks.3.weight [4, 8] bf16, frozen");
        assert_eq!(read(&record(None)), Description { name: None, look: "missing".to_owned() });
    }

    #[test]
    fn a_long_name_keeps_its_end() {
        let info = ParamInfo::new(format!("{}weight", "block.é".repeat(100)), [2], FloatType::F32);
        let read_back = read(&record(Some(&info)));
        assert!(read_back.name.unwrap().ends_with("éweight"));
        assert!(read_back.look.ends_with("éweight [2] f32"));
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

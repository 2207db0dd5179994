//! The values of a store, and the waits for them.

use std::collections::BTreeMap;

use super::{KEYS_MAX, STORE_BYTES_MAX, StoreOperation, StoreRefusal, StoreReply, StoreRequest};

/// The most waits for keys without a value.
const WAITS_MAX: usize = KEYS_MAX;

/// The values of a store, and the waits for keys that have none: the part of a transport that serves requests. A
/// caller is the sender of a request.
///
/// ```
/// use dist_transport::store::{StoreOperation, StoreReply, StoreRequest, StoreTable};
///
/// let mut table = StoreTable::default();
/// let request = |operation| StoreRequest { key: "service".to_owned(), operation };
/// assert_eq!(table.serve("rank 1", request(StoreOperation::Wait)), []);
/// let value = b"10.0.0.7:4000".to_vec();
/// let replies = table.serve("rank 0", request(StoreOperation::Set { value: value.clone() }));
/// assert_eq!(replies, [("rank 0", StoreReply::Done), ("rank 1", StoreReply::Value(Some(value)))]);
/// ```
#[derive(Debug)]
pub struct StoreTable<C> {
    values: BTreeMap<String, Vec<u8>>,
    /// Bytes of all keys and values.
    bytes: usize,
    /// The callers that wait for a key, by key, in the order of their requests.
    waits: BTreeMap<String, Vec<C>>,
}

impl<C> Default for StoreTable<C> {
    fn default() -> Self {
        Self { values: BTreeMap::new(), bytes: 0, waits: BTreeMap::new() }
    }
}

impl<C> StoreTable<C> {
    /// Serves a request. Returns the replies that it causes: to the caller, and to those that waited for the key.
    /// A wait for a key without a value causes none yet.
    pub fn serve(&mut self, caller: C, request: StoreRequest) -> Vec<(C, StoreReply)> {
        let StoreRequest { key, operation } = request;
        if operation == StoreOperation::Wait && !self.values.contains_key(&key) {
            return self.wait(caller, key);
        }
        let reply = self.reply(&key, operation);
        let released = self.values.get(&key).and_then(|value| Some((value, self.waits.remove(&key)?)));
        let released = released.map(|(value, callers)| {
            let value = StoreReply::Value(Some(value.clone()));
            callers.into_iter().map(|caller| (caller, value.clone())).collect::<Vec<_>>()
        });
        std::iter::once((caller, reply)).chain(released.into_iter().flatten()).collect()
    }

    /// Cancels the waits of these callers.
    pub fn cancel(&mut self, is_meant: impl Fn(&C) -> bool) {
        self.waits.retain(|_, callers| {
            callers.retain(|caller| !is_meant(caller));
            !callers.is_empty()
        });
    }

    fn wait(&mut self, caller: C, key: String) -> Vec<(C, StoreReply)> {
        if self.waits.values().map(Vec::len).sum::<usize>() >= WAITS_MAX {
            return vec![(caller, StoreReply::Refused(StoreRefusal::Full))];
        }
        self.waits.entry(key).or_default().push(caller);
        Vec::new()
    }

    fn reply(&mut self, key: &str, operation: StoreOperation) -> StoreReply {
        match operation {
            StoreOperation::Set { value } => self.set(key, value),
            StoreOperation::Get | StoreOperation::Wait => StoreReply::Value(self.values.get(key).cloned()),
            StoreOperation::Add { amount } => match self.sum(key, amount) {
                Ok(sum) => match self.set(key, sum.to_le_bytes().to_vec()) {
                    StoreReply::Done => StoreReply::Value(Some(sum.to_le_bytes().to_vec())),
                    refused => refused,
                },
                Err(refusal) => StoreReply::Refused(refusal),
            },
            StoreOperation::CompareAndSet { expected, value }
                if self.values.get(key) == expected.as_ref() =>
            {
                self.set(key, value)
            }
            StoreOperation::CompareAndSet { .. } => StoreReply::Value(self.values.get(key).cloned()),
            StoreOperation::Remove => {
                let removed = self.values.remove(key);
                self.bytes -= removed.as_ref().map_or(0, |value| key.len() + value.len());
                StoreReply::Value(removed)
            }
        }
    }

    fn sum(&self, key: &str, amount: i64) -> Result<i64, StoreRefusal> {
        let Some(value) = self.values.get(key) else { return Ok(amount) };
        let bytes = <[u8; 8]>::try_from(&**value);
        let number = i64::from_le_bytes(bytes.map_err(|_| StoreRefusal::NotANumber { len: value.len() })?);
        number.checked_add(amount).ok_or(StoreRefusal::Overflow { number })
    }

    fn set(&mut self, key: &str, value: Vec<u8>) -> StoreReply {
        let before = self.values.get(key).map_or(0, |before| key.len() + before.len());
        let bytes = self.bytes - before + key.len() + value.len();
        let is_new = !self.values.contains_key(key);
        if bytes > STORE_BYTES_MAX || is_new && self.values.len() >= KEYS_MAX {
            return StoreReply::Refused(StoreRefusal::Full);
        }
        self.bytes = bytes;
        self.values.insert(key.to_owned(), value);
        StoreReply::Done
    }
}

#[cfg(test)]
mod tests {
    use super::super::VALUE_BYTES_MAX;
    use super::*;

    fn serve(
        table: &mut StoreTable<u32>,
        caller: u32,
        key: &str,
        operation: StoreOperation,
    ) -> Vec<(u32, StoreReply)> {
        table.serve(caller, StoreRequest { key: key.to_owned(), operation })
    }

    fn set(value: &[u8]) -> StoreOperation {
        StoreOperation::Set { value: value.to_vec() }
    }

    fn value(value: &[u8]) -> StoreReply {
        StoreReply::Value(Some(value.to_vec()))
    }

    #[test]
    fn a_key_that_is_set_answers_all_waits_for_it_but_cancelled_ones() {
        let mut table = StoreTable::default();
        for caller in [1, 2, 3] {
            assert_eq!(serve(&mut table, caller, "a", StoreOperation::Wait), []);
        }
        assert_eq!(serve(&mut table, 4, "b", StoreOperation::Wait), []);
        table.cancel(|&caller| caller == 2);
        let replies = serve(&mut table, 5, "a", set(b"x"));
        assert_eq!(replies, [(5, StoreReply::Done), (1, value(b"x")), (3, value(b"x"))]);
        assert_eq!(
            serve(&mut table, 6, "a", set(b"y")),
            [(6, StoreReply::Done)],
            "no request waits any more"
        );
        assert_eq!(serve(&mut table, 7, "a", StoreOperation::Wait), [(7, value(b"y"))]);
    }

    #[test]
    fn a_sum_also_answers_waits_and_rejects_values_that_are_not_numbers() {
        let mut table = StoreTable::default();
        assert_eq!(serve(&mut table, 1, "n", StoreOperation::Wait), []);
        let sum = |number: i64| value(&number.to_le_bytes());
        let add = |amount| StoreOperation::Add { amount };
        assert_eq!(serve(&mut table, 2, "n", add(-3)), [(2, sum(-3)), (1, sum(-3))]);
        assert_eq!(serve(&mut table, 2, "n", add(5)), [(2, sum(2))]);
        let refused = |refusal| [(2, StoreReply::Refused(refusal))];
        assert_eq!(serve(&mut table, 2, "n", add(i64::MAX)), refused(StoreRefusal::Overflow { number: 2 }));
        assert_eq!(serve(&mut table, 2, "n", StoreOperation::Get), [(2, sum(2))]);
        serve(&mut table, 2, "text", set(b"abc"));
        assert_eq!(serve(&mut table, 2, "text", add(1)), refused(StoreRefusal::NotANumber { len: 3 }));
    }

    #[test]
    fn a_full_store_takes_values_again_after_one_was_removed() {
        let mut table = StoreTable::default();
        let large = vec![7; VALUE_BYTES_MAX];
        let count = STORE_BYTES_MAX / (VALUE_BYTES_MAX + 3);
        for number in 100..100 + count {
            assert_eq!(serve(&mut table, 0, &number.to_string(), set(&large)), [(0, StoreReply::Done)]);
        }
        let full = [(0, StoreReply::Refused(StoreRefusal::Full))];
        assert_eq!(serve(&mut table, 0, "new", set(&large)), full);
        assert_eq!(serve(&mut table, 0, "100", set(&large)), [(0, StoreReply::Done)], "as long as before");
        assert_eq!(serve(&mut table, 0, "100", StoreOperation::Remove), [(0, value(&large))]);
        assert_eq!(serve(&mut table, 0, "100", StoreOperation::Remove), [(0, StoreReply::Value(None))]);
        assert_eq!(serve(&mut table, 0, "new", set(&large)), [(0, StoreReply::Done)]);
    }

    #[test]
    fn the_number_of_keys_and_of_waits_is_bounded() {
        let full = [(0, StoreReply::Refused(StoreRefusal::Full))];
        let mut table = StoreTable::default();
        for number in 0..KEYS_MAX {
            serve(&mut table, 0, &number.to_string(), set(b""));
        }
        assert_eq!(serve(&mut table, 0, "new", set(b"")), full);
        for _ in 0..3 {
            serve(&mut table, 0, "absent", StoreOperation::Wait);
        }
        table.waits.insert("others".to_owned(), vec![0; WAITS_MAX - 3]);
        assert_eq!(serve(&mut table, 0, "absent", StoreOperation::Wait), full);
    }
}

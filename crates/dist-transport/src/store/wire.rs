//! Requests and replies of a store as bytes.

use std::io;

use super::{KEY_BYTES_MAX, StoreOperation, StoreRefusal, StoreReply, StoreRequest, VALUE_BYTES_MAX};

/// The most bytes of an encoded request or reply: a key, two values, and their lengths.
pub const MESSAGE_BYTES_MAX: usize = KEY_BYTES_MAX + 2 * VALUE_BYTES_MAX + 32;

impl StoreRequest {
    /// Returns the request as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        put(&mut bytes, self.key.as_bytes());
        match &self.operation {
            StoreOperation::Set { value } => {
                bytes.push(0);
                put(&mut bytes, value);
            }
            StoreOperation::Get => bytes.push(1),
            StoreOperation::Wait => bytes.push(2),
            StoreOperation::Add { amount } => {
                bytes.push(3);
                bytes.extend(amount.to_le_bytes());
            }
            StoreOperation::CompareAndSet { expected, value } => {
                bytes.push(4);
                put_optional(&mut bytes, expected.as_deref());
                put(&mut bytes, value);
            }
            StoreOperation::Remove => bytes.push(5),
        }
        bytes
    }

    /// Returns the request of these bytes, or `None` if they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Rest(bytes);
        let key = String::from_utf8(rest.bytes(KEY_BYTES_MAX)?).ok()?;
        let operation = match rest.byte()? {
            0 => StoreOperation::Set { value: rest.bytes(VALUE_BYTES_MAX)? },
            1 => StoreOperation::Get,
            2 => StoreOperation::Wait,
            3 => StoreOperation::Add { amount: rest.number()? },
            4 => StoreOperation::CompareAndSet {
                expected: rest.optional()?,
                value: rest.bytes(VALUE_BYTES_MAX)?,
            },
            5 => StoreOperation::Remove,
            _ => return None,
        };
        rest.0.is_empty().then_some(Self { key, operation })
    }
}

impl StoreReply {
    /// Returns the reply as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Done => bytes.push(0),
            Self::Value(value) => {
                bytes.push(1);
                put_optional(&mut bytes, value.as_deref());
            }
            Self::Refused(StoreRefusal::Full) => bytes.push(2),
            Self::Refused(StoreRefusal::NotANumber { len }) => {
                bytes.push(3);
                bytes.extend(i64::try_from(*len).unwrap_or(i64::MAX).to_le_bytes());
            }
            Self::Refused(StoreRefusal::Overflow { number }) => {
                bytes.push(4);
                bytes.extend(number.to_le_bytes());
            }
        }
        bytes
    }

    /// Returns the reply of these bytes, or `None` if they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = Rest(bytes);
        let reply = match rest.byte()? {
            0 => Self::Done,
            1 => Self::Value(rest.optional()?),
            2 => Self::Refused(StoreRefusal::Full),
            3 => Self::Refused(StoreRefusal::NotANumber { len: usize::try_from(rest.number()?).ok()? }),
            4 => Self::Refused(StoreRefusal::Overflow { number: rest.number()? }),
            _ => return None,
        };
        rest.0.is_empty().then_some(reply)
    }
}

/// Puts the pieces of one sender's messages together, which are requests or replies.
#[derive(Debug, Default)]
pub struct StoreInbox(Vec<u8>);

impl StoreInbox {
    /// Adds a piece. Returns the message if it is complete.
    ///
    /// # Errors
    /// `InvalidData` if the message is too long.
    pub fn add(&mut self, piece: &[u8], is_last: bool) -> io::Result<Option<Vec<u8>>> {
        self.0.extend(piece);
        if self.0.len() > MESSAGE_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(is_last.then(|| std::mem::take(&mut self.0)))
    }
}

/// Appends bytes after their length.
fn put(bytes: &mut Vec<u8>, part: &[u8]) {
    let len = u32::try_from(part.len()).expect("keys and values are short");
    bytes.extend(len.to_le_bytes());
    bytes.extend(part);
}

fn put_optional(bytes: &mut Vec<u8>, part: Option<&[u8]>) {
    bytes.push(u8::from(part.is_some()));
    if let Some(part) = part {
        put(bytes, part);
    }
}

/// The bytes that were not decoded yet. Its methods return `None` if there are too few.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn number(&mut self) -> Option<i64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(i64::from_le_bytes(*number))
    }

    /// Reads at most `max` bytes after their length.
    fn bytes(&mut self, max: usize) -> Option<Vec<u8>> {
        let (len, rest) = self.0.split_first_chunk()?;
        let len = u32::from_le_bytes(*len) as usize;
        let (part, rest) = rest.split_at_checked(len).filter(|_| len <= max)?;
        self.0 = rest;
        Some(part.to_vec())
    }

    fn optional(&mut self) -> Option<Option<Vec<u8>>> {
        match self.byte()? {
            0 => Some(None),
            1 => self.bytes(VALUE_BYTES_MAX).map(Some),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_and_replies_survive_the_wire() {
        let value = || vec![3; 300];
        let operations = [
            StoreOperation::Set { value: value() },
            StoreOperation::Get,
            StoreOperation::Wait,
            StoreOperation::Add { amount: i64::MIN },
            StoreOperation::CompareAndSet { expected: None, value: value() },
            StoreOperation::CompareAndSet { expected: Some(Vec::new()), value: value() },
            StoreOperation::Remove,
        ];
        for operation in operations {
            let request = StoreRequest { key: "é".to_owned(), operation };
            assert_eq!(StoreRequest::decode(&request.encode()), Some(request));
        }
        let replies = [
            StoreReply::Done,
            StoreReply::Value(None),
            StoreReply::Value(Some(value())),
            StoreReply::Refused(StoreRefusal::Full),
            StoreReply::Refused(StoreRefusal::NotANumber { len: 3 }),
            StoreReply::Refused(StoreRefusal::Overflow { number: -1 }),
        ];
        for reply in replies {
            assert_eq!(StoreReply::decode(&reply.encode()), Some(reply));
        }
    }

    #[test]
    fn the_longest_request_fits_into_a_message() {
        let value = vec![0; VALUE_BYTES_MAX];
        let operation = StoreOperation::CompareAndSet { expected: Some(value.clone()), value };
        let bytes = StoreRequest { key: "k".repeat(KEY_BYTES_MAX), operation }.encode();
        assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{}", bytes.len());
    }

    #[test]
    fn a_request_that_is_too_long_is_rejected() {
        let request = |key: usize, value: usize| {
            let operation = StoreOperation::Set { value: vec![0; value] };
            StoreRequest::decode(&StoreRequest { key: "k".repeat(key), operation }.encode())
        };
        assert!(request(KEY_BYTES_MAX, VALUE_BYTES_MAX).is_some());
        assert!(request(KEY_BYTES_MAX + 1, 0).is_none());
        assert!(request(0, VALUE_BYTES_MAX + 1).is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_refused(bytes in prop::collection::vec(0_u8..8, 0..40)) {
            if let Some(request) = StoreRequest::decode(&bytes) {
                prop_assert_eq!(request.encode(), &*bytes);
            }
            if let Some(reply) = StoreReply::decode(&bytes) {
                prop_assert_eq!(reply.encode(), bytes);
            }
        }
    }
}

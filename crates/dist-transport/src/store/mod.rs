//! The key-value store of a job, which the coordinator serves.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::rounded;
use crate::{Abort, Deadline, Runtime};

mod table;
mod wire;

pub use table::StoreTable;
pub use wire::{MESSAGE_BYTES_MAX, StoreInbox};

/// The longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 256;
/// The longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 64 * 1024;
/// The most keys of a store.
pub const KEYS_MAX: usize = 64 * 1024;
/// The most bytes of all keys and values of a store together.
pub const STORE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// The timeout of a request unless [`Store::with_timeout`] sets another one.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);

/// The key-value store of a job: small values that every rank can read and change at any time.
///
/// The coordinator keeps the values, and its thread serves the requests, also while ranks compute. A request takes
/// some tens of microseconds on one host, and a round trip between hosts. There is one store for the whole job: each
/// transport of each rank reaches the same keys. The values of a world are lost with the world.
///
/// Requests are no calls of a communicator. They have no order among the ranks, and may be made by any thread. Each
/// request takes effect once and at one moment: of several ranks that add to a number, each gets another result.
///
/// A request that fails does not end the job. If no answer has arrived by the deadline, the request may still take
/// effect.
///
/// A store is cheap to clone. A rank stays in its job as long as it holds a store.
///
/// ```
/// use dist_transport::{Transport, sim};
///
/// let outcome = sim::run(1, 3, |transport| {
///     let store = transport.store()?;
///     // The first rank that comes serves the others.
///     let number = store.add("arrivals", 1)?;
///     if number == 1 {
///         store.set("service", b"10.0.0.7:4000")?;
///     }
///     store.wait("service")
/// });
/// assert!(outcome.results.into_iter().all(|address| address.unwrap() == b"10.0.0.7:4000"));
/// ```
#[doc(alias = "TCPStore")]
#[derive(Clone)]
pub struct Store {
    service: Arc<dyn StoreService>,
    runtime: Runtime,
    timeout: Duration,
}

impl Store {
    /// Creates a store whose requests this service serves. Waits use this runtime.
    pub fn new(service: Arc<dyn StoreService>, runtime: &Runtime) -> Self {
        Self { service, runtime: runtime.clone(), timeout: TIMEOUT_DEFAULT }
    }

    /// Sets how long each request may last. The default is 60 seconds.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// If the key or the value is too long, or the store is full. As for every request, if the job is aborted, or
    /// the coordinator does not answer by the deadline.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.request(key, StoreOperation::Set { value: self.checked(key, value)? }).map(drop)
    }

    /// Returns the value of a key, if it has one.
    ///
    /// # Errors
    /// As for [`set`](Self::set).
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.request(key, StoreOperation::Get).map(StoreReply::into_value)
    }

    /// Waits until a key has a value, and returns the value.
    ///
    /// # Errors
    /// [`StoreError::NotSet`] if the key has no value by the deadline. Otherwise as for [`set`](Self::set).
    pub fn wait(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        let value = self.request(key, StoreOperation::Wait)?.into_value();
        Ok(value.expect("a wait is answered when the key has a value"))
    }

    /// Adds to the number of a key, and returns the sum. A key without a value counts as 0. The value of the key is
    /// the number's 8 bytes in little-endian order.
    ///
    /// ```
    /// use dist_transport::{Transport, sim};
    ///
    /// // Dynamic scheduling: each rank takes the next index of a loop when it is ready for it.
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let store = transport.store().unwrap();
    ///     let next = || store.add("next index", 1).unwrap() - 1;
    ///     std::iter::repeat_with(next).take_while(|&index| index < 100).collect::<Vec<i64>>()
    /// });
    /// let mut all = outcome.results.concat();
    /// all.sort_unstable();
    /// assert_eq!(all, (0..100).collect::<Vec<i64>>());
    /// ```
    ///
    /// # Errors
    /// If the value is not 8 bytes long, or the sum is too large for its type; the value then stays as it was.
    /// Otherwise as for [`set`](Self::set).
    #[doc(alias = "MPI_Fetch_and_op")]
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        let sum = self.request(key, StoreOperation::Add { amount })?.into_value();
        let bytes = sum.and_then(|sum| <[u8; 8]>::try_from(sum).ok());
        Ok(i64::from_le_bytes(bytes.expect("a sum has 8 bytes")))
    }

    /// Sets the value of a key if its value is `expected`; `None` means that the key has no value. Returns the other
    /// value if it differs, and changes nothing then.
    ///
    /// # Errors
    /// As for [`set`](Self::set).
    #[doc(alias = "compare_set")]
    #[doc(alias = "MPI_Compare_and_swap")]
    pub fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        value: &[u8],
    ) -> Result<Comparison, StoreError> {
        let expected = expected.map(|expected| self.checked(key, expected)).transpose()?;
        let value = self.checked(key, value)?;
        match self.request(key, StoreOperation::CompareAndSet { expected, value })? {
            StoreReply::Done => Ok(Comparison::Equal),
            reply => Ok(Comparison::Different { value: reply.into_value() }),
        }
    }

    /// Removes a key, and returns its value if it had one.
    ///
    /// # Errors
    /// As for [`set`](Self::set).
    #[doc(alias = "delete_key")]
    pub fn remove(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.request(key, StoreOperation::Remove).map(StoreReply::into_value)
    }

    /// Copies a value that is not too long.
    fn checked(&self, key: &str, value: &[u8]) -> Result<Vec<u8>, StoreError> {
        match value.len() {
            ..=VALUE_BYTES_MAX => Ok(value.to_vec()),
            len => Err(StoreError::ValueTooLong { key: key.to_owned(), len }),
        }
    }

    fn request(&self, key: &str, operation: StoreOperation) -> Result<StoreReply, StoreError> {
        if key.len() > KEY_BYTES_MAX {
            return Err(StoreError::KeyTooLong { len: key.len() });
        }
        let (deadline, is_wait) = (self.runtime.deadline(self.timeout), operation == StoreOperation::Wait);
        let request = StoreRequest { key: key.to_owned(), operation };
        let key = key.to_owned();
        match self.service.request(request, deadline).map_err(StoreError::Aborted)? {
            Some(StoreReply::Refused(refusal)) => Err(refusal.into_error(key)),
            Some(reply) => Ok(reply),
            None if is_wait => Err(StoreError::NotSet { key, limit: self.timeout }),
            None => Err(StoreError::Unanswered { key, limit: self.timeout }),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// The result of [`Store::compare_and_set`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Comparison {
    /// The key had the expected value, and has the new one now.
    Equal,
    /// The key has another value and keeps it.
    Different {
        /// The value; `None` if the key has none.
        value: Option<Vec<u8>>,
    },
}

/// The implementation behind a [`Store`].
pub trait StoreService: Send + Sync {
    /// Sends a request and waits for the reply. Returns `None` at the deadline; a [wait](StoreOperation::Wait) is
    /// then cancelled.
    ///
    /// # Errors
    /// If the job is aborted.
    fn request(&self, request: StoreRequest, deadline: Deadline) -> Result<Option<StoreReply>, Abort>;
}

/// A request to a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreRequest {
    /// The key, of at most [`KEY_BYTES_MAX`] bytes.
    pub key: String,
    /// The operation on its value.
    pub operation: StoreOperation,
}

/// An operation on the value of one key. Values have at most [`VALUE_BYTES_MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreOperation {
    /// Sets the value. The reply is [`StoreReply::Done`].
    Set {
        /// The new value.
        value: Vec<u8>,
    },
    /// Returns the value.
    Get,
    /// Returns the value once there is one.
    Wait,
    /// Adds to a number of 8 bytes in little-endian order, and returns the sum.
    Add {
        /// The number to add.
        amount: i64,
    },
    /// Sets the value if it is the expected one. The reply is [`StoreReply::Done`], or the other value.
    CompareAndSet {
        /// The expected value; `None` means that the key has none.
        expected: Option<Vec<u8>>,
        /// The new value.
        value: Vec<u8>,
    },
    /// Removes the key and returns its value.
    Remove,
}

/// The reply to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreReply {
    /// The value was set.
    Done,
    /// The value; `None` if the key has none.
    Value(Option<Vec<u8>>),
    /// Nothing was changed.
    Refused(StoreRefusal),
}

impl StoreReply {
    fn into_value(self) -> Option<Vec<u8>> {
        match self {
            Self::Value(value) => value,
            Self::Done | Self::Refused(_) => None,
        }
    }
}

/// The reason why a store has changed nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRefusal {
    /// The store has the most keys, bytes or waits that it may have.
    Full,
    /// The value is no number: it has this length.
    NotANumber {
        /// The length of the value.
        len: usize,
    },
    /// The sum is too large for its type.
    Overflow {
        /// The present number.
        number: i64,
    },
}

impl StoreRefusal {
    fn into_error(self, key: String) -> StoreError {
        match self {
            Self::Full => StoreError::Full { key },
            Self::NotANumber { len } => StoreError::NotANumber { key, len },
            Self::Overflow { number } => StoreError::Overflow { key, number },
        }
    }
}

crate::error_enum! {
/// An error of a request to a [`Store`]. Only [`Aborted`](Self::Aborted) ends the job.
#[derive(thiserror::Error, Clone)]
#[non_exhaustive]
pub enum StoreError {
    /// The transport has no store.
    #[error("this transport has no key-value store: use the transport of a world that has joined at a coordinator")]
    NoStore,
    /// The key was not set by the deadline.
    #[error(
        "store: no rank has set the key {key:?} within {}: check that a rank sets it; if it only needs longer, set a \
         longer time with Store::with_timeout", rounded(*limit)
    )]
    NotSet {
        /// The key that was waited for.
        key: String,
        /// The timeout of the request.
        limit: Duration,
    },
    /// The coordinator has not answered by the deadline. The request may still take effect.
    #[error(
        "store: the coordinator has not answered a request for the key {key:?} within {}; the request may still take \
         effect; if it only needs longer, set a longer time with Store::with_timeout", rounded(*limit)
    )]
    Unanswered {
        /// The key of the request.
        key: String,
        /// The timeout of the request.
        limit: Duration,
    },
    /// The job was aborted. Every rank gets the same record, which is the source.
    #[error("the job was aborted")]
    Aborted(#[source] Abort),
    /// The key is too long.
    #[error("store: the key has {len} bytes, and a key may have at most {KEY_BYTES_MAX}")]
    KeyTooLong {
        /// Bytes of the key.
        len: usize,
    },
    /// The value is too long.
    #[error("store: the value for the key {key:?} has {len} bytes, and a value may have at most {VALUE_BYTES_MAX}: broadcast large data")]
    ValueTooLong {
        /// The key.
        key: String,
        /// Bytes of the value.
        len: usize,
    },
    /// The store is full.
    #[error(
        "store: no room for the key {key:?}: a store has at most {KEYS_MAX} keys, {STORE_BYTES_MAX} bytes and \
         {KEYS_MAX} waits; remove keys that are not needed any more"
    )]
    Full {
        /// The key.
        key: String,
    },
    /// A value that is no number was added to.
    #[error("store: the key {key:?} has a value of {len} bytes, and only a number of 8 bytes can be added to")]
    NotANumber {
        /// The key.
        key: String,
        /// Bytes of the value.
        len: usize,
    },
    /// A sum is too large for its type.
    #[error("store: the sum for the key {key:?}, which is {number} now, is too large for an i64")]
    Overflow {
        /// The key.
        key: String,
        /// The present number.
        number: i64,
    },
}
}

impl StoreError {
    /// Returns `true` if a deadline passed.
    pub const fn is_timeout(&self) -> bool {
        matches!(self, Self::NotSet { .. } | Self::Unanswered { .. })
    }

    /// Returns the rank that the error is about, if it is about one, by its number in the world.
    pub const fn peer(&self) -> Option<usize> {
        match self {
            Self::Aborted(abort) => Some(abort.rank),
            _ => None,
        }
    }
}

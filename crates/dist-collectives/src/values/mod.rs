//! Values of any type that serde supports, between ranks.

mod decode;
mod encode;
mod memory;
mod packed;
#[cfg(test)]
mod tests;

use dist_transport::{Cause, Chain};
pub(crate) use memory::ValueMemory;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::{CallOptions, Engine};
use crate::{Communicator, Error, Operation, Pending, Result};

/// Maximum length of the encoding of one rank's value, in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 30;

/// The reason why a value could not be transferred, in [`Error::Value`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueProblem {
    /// The root passed no value.
    Missing,
    /// Serde could not encode the value.
    NotEncodable,
    /// The encoding of the value is longer than [`VALUE_BYTES_MAX`].
    TooLong,
    /// The received bytes cannot be decoded as a value of the expected type.
    NotDecodable,
}

impl ValueProblem {
    /// Returns the end of a sentence about a value.
    pub(crate) const fn as_predicate(self) -> &'static str {
        match self {
            Self::Missing => "is missing",
            Self::NotEncodable => "cannot be encoded",
            Self::TooLong => "is too long",
            Self::NotDecodable => "cannot be decoded as the type that is expected",
        }
    }
}

/// # Values of any type
///
/// Feature `serde`. A value is sent as MessagePack with the names of its fields, after its length. Attributes of
/// serde that skip, flatten or untag work as with JSON, and NaN is supported. As with JSON, an absent value inside
/// of an optional one (`Some(None)`) becomes `None`. If a value cannot be transferred, every rank that should
/// receive it gets the same error, and the communicator can still be used.
///
/// Sequences of numbers of one type, such as a `Vec<f64>` in a field, are sent as their bytes. Values can be nested in
/// up to 256 levels.
impl Communicator {
    /// Sends the root's value to every rank. The root passes `Some`; values of other ranks are dropped.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 3, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let words = (comm.rank() == 1).then(|| vec!["any".to_owned(), "value".to_owned()]);
    ///     comm.broadcast_value(words, 1).unwrap().join(" ")
    /// });
    /// assert_eq!(outcome.results, ["any value"; 3]);
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] if the root passes no value, or if it cannot be encoded, or decoded as a `V`. As for
    /// [`broadcast`](Self::broadcast).
    #[doc(alias = "broadcast_object")]
    #[doc(alias = "broadcast_object_list")]
    pub fn broadcast_value<V: Serialize + DeserializeOwned>(
        &mut self,
        value: Option<V>,
        root: usize,
    ) -> Result<V> {
        self.call(|engine, options| engine.broadcast_value(value.as_ref(), root, options))
    }

    /// Sends the values of all ranks to the root, in rank order. Returns `None` on the other ranks.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     comm.gather_values(&format!("I am {}", comm.rank()), 0).unwrap()
    /// });
    /// assert_eq!(outcome.results, [Some(vec!["I am 0".to_owned(), "I am 1".to_owned()]), None]);
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] if a rank's value cannot be encoded, or decoded on the root. As for [`gather`](Self::gather).
    #[doc(alias = "gather_object")]
    pub fn gather_values<V: Serialize + DeserializeOwned>(
        &mut self,
        value: &V,
        root: usize,
    ) -> Result<Option<Vec<V>>> {
        self.call(|engine, options| engine.gather_values(value, root, options))
    }

    /// Sends the values of all ranks to every rank, in rank order.
    ///
    /// # Errors
    /// [`Error::Value`] if a rank's value cannot be encoded or decoded. As for [`all_gather`](Self::all_gather).
    #[doc(alias = "all_gather_object")]
    pub fn all_gather_values<V: Serialize + DeserializeOwned>(&mut self, value: &V) -> Result<Vec<V>> {
        self.call(|engine, options| engine.all_gather_values(value, options))
    }

    /// Sends one of the root's values to each rank. The root passes one value per rank, in rank order; the values
    /// of other ranks are ignored.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     let shares = if comm.rank() == 0 { vec!["half", "the other"] } else { Vec::new() };
    ///     let shares: Vec<String> = shares.into_iter().map(str::to_owned).collect();
    ///     comm.scatter_values(&shares, 0).unwrap()
    /// });
    /// assert_eq!(outcome.results, ["half", "the other"]);
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] on every rank if the root passes too few values or one of them cannot be encoded, and on a
    /// rank whose value cannot be decoded as a `V`. If the root passes too many, it gets [`Error::Counts`], and the
    /// other ranks get a missing value. As for [`scatter`](Self::scatter).
    #[doc(alias = "scatter_object_list")]
    pub fn scatter_values<V: Serialize + DeserializeOwned>(
        &mut self,
        values: &[V],
        root: usize,
    ) -> Result<V> {
        self.call(|engine, options| engine.scatter_values(values, root, options))
    }

    /// Sends a value, which `to` receives with [`recv_value`](Self::recv_value), as two [messages](Self::send): its
    /// length and its bytes.
    ///
    /// # Errors
    /// [`Error::Value`] on both ranks if it cannot be encoded. As for [`send`](Self::send).
    #[doc(alias = "send_object_list")]
    pub fn send_value<V: Serialize>(&mut self, value: &V, to: usize) -> Result<()> {
        self.call_messages(|engine, options| engine.send_value(value, to, &options))
    }

    /// Receives the oldest value that `from` has sent with [`send_value`](Self::send_value) and this rank has not
    /// received yet.
    ///
    /// ```
    /// use dist_collectives::Communicator;
    /// use dist_transport::sim;
    ///
    /// let outcome = sim::run(1, 2, |transport| {
    ///     let mut comm = Communicator::new(transport);
    ///     match comm.rank() {
    ///         0 => comm.send_value(&("step", 7), 1).map(|()| None).unwrap(),
    ///         _ => Some(comm.recv_value::<(String, i32)>(0).unwrap()),
    ///     }
    /// });
    /// assert_eq!(outcome.results[1], Some(("step".to_owned(), 7)));
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] if it could not be encoded, or cannot be decoded as a `V`. As for [`recv`](Self::recv).
    #[doc(alias = "recv_object_list")]
    pub fn recv_value<V: DeserializeOwned>(&mut self, from: usize) -> Result<V> {
        self.call_messages(|engine, options| engine.receive_value(from, &options))
    }

    /// Starts a [`broadcast_value`](Self::broadcast_value), which returns `Some`. After an error this rank's value
    /// is returned.
    #[doc(alias = "broadcast_object_list")]
    pub fn start_broadcast_value<V: Serialize + DeserializeOwned + Send + 'static>(
        &mut self,
        value: Option<V>,
        root: usize,
    ) -> Pending<Option<V>> {
        self.start(value, move |engine, value, options| {
            *value = Some(engine.broadcast_value(value.as_ref(), root, options)?);
            Ok(())
        })
    }

    /// Starts a [`gather_values`](Self::gather_values), which returns the values of all ranks on the root and none
    /// on the others. After an error this rank's value is returned.
    #[doc(alias = "gather_object")]
    pub fn start_gather_values<V: Serialize + DeserializeOwned + Send + 'static>(
        &mut self,
        value: V,
        root: usize,
    ) -> Pending<Vec<V>> {
        self.start(vec![value], move |engine, values, options| {
            *values = engine.gather_values(&values[0], root, options)?.unwrap_or_default();
            Ok(())
        })
    }

    /// Starts an [`all_gather_values`](Self::all_gather_values). After an error this rank's value is returned.
    #[doc(alias = "all_gather_object")]
    pub fn start_all_gather_values<V: Serialize + DeserializeOwned + Send + 'static>(
        &mut self,
        value: V,
    ) -> Pending<Vec<V>> {
        self.start(vec![value], |engine, values, options| {
            *values = engine.all_gather_values(&values[0], options)?;
            Ok(())
        })
    }
}

impl Engine {
    fn broadcast_value<V: Serialize + DeserializeOwned>(
        &mut self,
        value: Option<&V>,
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<V> {
        let value = value.filter(|_| self.rank().index() == root);
        let encoded = match value {
            Some(value) => self.encode(value),
            None => Err((ValueProblem::Missing, None)),
        };
        let (is_root, mut announced) = (encoded.is_ok(), [announcement(&encoded)]);
        self.broadcast(&mut announced, root, options)?;
        let mut bytes = match (length_of(announced[0]), encoded) {
            (Ok(_), Ok(bytes)) => bytes,
            (Ok(length), Err(_)) => self.received_bytes(length)?,
            (Err(problem), Err((_, source))) => return Err(error(self.in_world(root), problem, source)),
            (Err(problem), Ok(_)) => return Err(error(self.in_world(root), problem, None)),
        };
        self.broadcast(&mut bytes, root, options)?;
        // The root decodes too, so that every rank has the same value or the same error.
        let value = decode(self.in_world(root), &bytes);
        if is_root {
            self.value_memory.keep_encoded(bytes);
        } else {
            self.value_memory.keep_received(bytes);
        }
        value
    }

    fn gather_values<V: Serialize + DeserializeOwned>(
        &mut self,
        value: &V,
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<Option<Vec<V>>> {
        self.check_root(Operation::Gather, root)?;
        let (bytes, counts) = self.encoded_with_counts(value, options)?;
        let is_root = self.rank().index() == root;
        let mut gathered = self.received_bytes(if is_root { counts.iter().sum() } else { 0 })?;
        self.gather(&bytes, Some(&counts), &mut gathered, root, options)?;
        let values = is_root.then(|| decode_all(&gathered, &counts, self.transport.members())).transpose();
        self.value_memory.keep_encoded(bytes);
        self.value_memory.keep_received(gathered);
        values
    }

    fn all_gather_values<V: Serialize + DeserializeOwned>(
        &mut self,
        value: &V,
        options: &CallOptions<'_>,
    ) -> Result<Vec<V>> {
        let (bytes, counts) = self.encoded_with_counts(value, options)?;
        let mut gathered = self.received_bytes(counts.iter().sum())?;
        self.all_gather((&bytes[..]).into(), Some(&counts), &mut gathered, options)?;
        let values = decode_all(&gathered, &counts, self.transport.members());
        self.value_memory.keep_encoded(bytes);
        self.value_memory.keep_received(gathered);
        values
    }

    fn scatter_values<V: Serialize + DeserializeOwned>(
        &mut self,
        values: &[V],
        root: usize,
        options: &CallOptions<'_>,
    ) -> Result<V> {
        let (operation, world_size) = (Operation::Scatter, self.rank().world_size());
        self.check_root(operation, root)?;
        let is_root = self.rank().index() == root;
        let mut announced = vec![code(ValueProblem::Missing); world_size];
        let (mut bytes, mut source) = (Vec::new(), None);
        let fitting = if is_root && values.len() <= world_size { values } else { &[] };
        for (value, announced) in fitting.iter().zip(&mut announced) {
            let encoded = encode(value, Vec::new());
            *announced = announcement(&encoded);
            match encoded {
                Ok(encoded) => bytes.extend(encoded),
                Err((_, because)) => {
                    source = because;
                    break;
                }
            }
        }
        self.broadcast(&mut announced, root, options)?;
        if is_root && values.len() > world_size {
            return Err(Error::Counts { operation, counts: values.len(), world_size });
        }
        let counts: Result<Vec<usize>, _> = announced.into_iter().map(length_of).collect();
        let counts = counts.map_err(|problem| error(self.in_world(root), problem, source))?;
        let mut own = self.output(counts[self.rank().index()])?;
        self.scatter(&bytes, Some(&counts), &mut own, root, options)?;
        decode(self.in_world(root), &own)
    }

    fn send_value<V: Serialize>(&mut self, value: &V, to: usize, options: &CallOptions<'_>) -> Result<()> {
        let encoded = self.encode(value);
        self.send(&[announcement(&encoded)], to, options)?;
        let own = self.in_world(self.rank().index());
        let bytes = encoded.map_err(|(problem, source)| error(own, problem, source))?;
        self.send(&bytes, to, options)?;
        self.value_memory.keep_encoded(bytes);
        Ok(())
    }

    fn receive_value<V: DeserializeOwned>(&mut self, from: usize, options: &CallOptions<'_>) -> Result<V> {
        let mut announced = [0];
        self.receive(&mut announced, from, options)?;
        let sender = self.in_world(from);
        let length = length_of(announced[0]).map_err(|problem| error(sender, problem, None))?;
        let mut bytes = self.received_bytes(length)?;
        self.receive(&mut bytes, from, options)?;
        let value = decode(sender, &bytes);
        self.value_memory.keep_received(bytes);
        value
    }

    /// Returns this rank's encoded value, and the number of bytes of each rank's value.
    fn encoded_with_counts<V: Serialize>(
        &mut self,
        value: &V,
        options: &CallOptions<'_>,
    ) -> Result<(Vec<u8>, Vec<usize>)> {
        let (rank, mut encoded) = (self.rank().index(), self.encode(value));
        let mut announced = vec![0; self.rank().world_size()];
        self.all_gather((&[announcement(&encoded)][..]).into(), None, &mut announced, options)?;
        let mut counts = Vec::with_capacity(announced.len());
        for (other, announced) in announced.into_iter().enumerate() {
            let source =
                encoded.as_mut().err().filter(|_| other == rank).and_then(|(_, source)| source.take());
            counts
                .push(length_of(announced).map_err(|problem| error(self.in_world(other), problem, source))?);
        }
        Ok((encoded.unwrap_or_default(), counts))
    }

    /// Encodes a value in memory that is kept between calls.
    fn encode<V: Serialize>(&mut self, value: &V) -> Encoded {
        encode(value, self.value_memory.take_for_encoding())
    }

    /// Returns memory to receive this many bytes into. If there is not enough, the job is aborted, because other ranks
    /// wait.
    fn received_bytes(&mut self, len: usize) -> Result<Vec<u8>> {
        self.value_memory.take_for_receiving(len).map_err(|source| {
            let error = Error::Memory { elements: len, source };
            self.transport.abort(Cause::gave_up(Chain(&error)));
            error
        })
    }
}

/// An encoded value, or the reason why there is none.
type Encoded = Result<Vec<u8>, (ValueProblem, Option<BoxedSource>)>;

type BoxedSource = Box<dyn std::error::Error + Send + Sync>;

fn encode<V: Serialize>(value: &V, memory: Vec<u8>) -> Encoded {
    match encode::encode(value, memory) {
        Ok(bytes) if bytes.len() <= VALUE_BYTES_MAX => Ok(bytes),
        Ok(_) => Err((ValueProblem::TooLong, None)),
        Err(source) => Err((ValueProblem::NotEncodable, Some(source.into()))),
    }
}

fn error(rank: usize, problem: ValueProblem, source: Option<BoxedSource>) -> Error {
    Error::Value { rank, problem, source }
}

fn decode<V: DeserializeOwned>(rank: usize, bytes: &[u8]) -> Result<V> {
    decode::decode(bytes).map_err(|source| error(rank, ValueProblem::NotDecodable, Some(source.into())))
}

fn decode_all<V: DeserializeOwned>(mut bytes: &[u8], counts: &[usize], ranks: &[usize]) -> Result<Vec<V>> {
    let mut decode_next = |(&count, &rank)| {
        let (own, rest) = bytes.split_at(count);
        bytes = rest;
        decode(rank, own)
    };
    counts.iter().zip(ranks).map(&mut decode_next).collect()
}

/// Returns the number that a rank sends before its bytes: their length, or a code for the reason why there are none.
fn announcement(encoded: &Encoded) -> u64 {
    encoded.as_ref().map_or_else(|&(problem, _)| code(problem), |bytes| bytes.len() as u64)
}

fn code(problem: ValueProblem) -> u64 {
    u64::MAX - problem as u64
}

/// Returns the announced length, or the problem.
fn length_of(announced: u64) -> Result<usize, ValueProblem> {
    let problems = [ValueProblem::Missing, ValueProblem::NotEncodable];
    if let Some(problem) = problems.into_iter().find(|&problem| code(problem) == announced) {
        return Err(problem);
    }
    usize::try_from(announced).ok().filter(|&length| length <= VALUE_BYTES_MAX).ok_or(ValueProblem::TooLong)
}

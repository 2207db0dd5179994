//! The description of a collective call and its encoding as a fingerprint.

use std::fmt;
use std::ops::Range;

use dist_algos::{ALGORITHMS, Algorithm, AlgorithmTable, CollectiveKind};
use dist_transport::Fingerprint;

use crate::element_type::LAYOUT_BITS;
use crate::history::{History, HistoryDigest, is_internal, user_calls_before};
use crate::{DType, ElementType, ReduceKind, ReductionOrder};

/// An operation of the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Every rank gets the reduction of all buffers.
    AllReduce,
    /// Every rank gets its part of the reduction of all buffers.
    ReduceScatter,
    /// Every rank gets all buffers.
    AllGather,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// The root gets the reduction of all buffers.
    Reduce,
    /// The root gets all buffers.
    Gather,
    /// Every rank gets its part of the root's buffer.
    Scatter,
    /// Every rank gets a part of every rank's buffer.
    AllToAll,
    /// Every rank gets the reduction of the buffers up to its own.
    Scan,
    /// Every rank gets the reduction of the buffers before its own.
    ExclusiveScan,
    /// No rank leaves before all ranks have entered.
    Barrier,
    /// No rank leaves before all ranks have entered, or before the absent ranks are known.
    MonitoredBarrier,
    /// One rank sends to another.
    Message,
    /// Every rank may read every rank's buffer until all ranks have closed theirs.
    Window,
    /// Work that consists of many calls, such as a training step. The ranks have
    /// [announced](crate::Communicator::announce) that they begin it.
    Announced,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 15] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Scan,
        Self::ExclusiveScan,
        Self::Barrier,
        Self::MonitoredBarrier,
        Self::Message,
        Self::Window,
        Self::Announced,
    ];

    /// Returns the name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => CollectiveKind::AllReduce.name(),
            Self::ReduceScatter => CollectiveKind::ReduceScatter.name(),
            Self::AllGather => CollectiveKind::AllGather.name(),
            Self::Broadcast => CollectiveKind::Broadcast.name(),
            Self::Reduce => CollectiveKind::Reduce.name(),
            Self::Gather => CollectiveKind::Gather.name(),
            Self::Scatter => CollectiveKind::Scatter.name(),
            Self::AllToAll => CollectiveKind::AllToAll.name(),
            Self::Scan => CollectiveKind::Scan.name(),
            Self::ExclusiveScan => CollectiveKind::ExclusiveScan.name(),
            Self::Barrier => CollectiveKind::Barrier.name(),
            Self::MonitoredBarrier => "monitored_barrier",
            Self::Message => "message",
            Self::Window => "window",
            Self::Announced => "announced",
        }
    }

    /// Returns the collective operation, if there are algorithms for it.
    pub fn collective(self) -> Option<CollectiveKind> {
        CollectiveKind::ALL.into_iter().find(|&kind| Self::from(kind) == self)
    }

    /// Returns the algorithms of the operation; none if it has only one.
    pub fn algorithms(self) -> impl Iterator<Item = Algorithm> + Clone {
        self.algorithms_in(ALGORITHMS)
    }

    /// Returns the algorithms that a table lists for the operation.
    pub fn algorithms_in<'a>(
        self,
        table: AlgorithmTable<'a>,
    ) -> impl Iterator<Item = Algorithm> + Clone + use<'a> {
        self.collective().into_iter().flat_map(move |kind| table.of(kind))
    }

    /// Returns the algorithm of the operation with this name.
    ///
    /// ```
    /// use dist_collectives::algorithms::ring;
    /// use dist_collectives::tuning::{Algorithm, Operation};
    ///
    /// assert_eq!(Operation::AllReduce.algorithm("ring"), Some(Algorithm::from(&ring::ALL_REDUCE)));
    /// ```
    pub fn algorithm(self, name: &str) -> Option<Algorithm> {
        self.algorithms().find(|algorithm| algorithm.name() == name)
    }

    /// Returns the operation with this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }
}

impl From<CollectiveKind> for Operation {
    #[inline(always)]
    fn from(kind: CollectiveKind) -> Self {
        match kind {
            CollectiveKind::AllReduce => Self::AllReduce,
            CollectiveKind::ReduceScatter => Self::ReduceScatter,
            CollectiveKind::AllGather => Self::AllGather,
            CollectiveKind::Broadcast => Self::Broadcast,
            CollectiveKind::Reduce => Self::Reduce,
            CollectiveKind::Gather => Self::Gather,
            CollectiveKind::Scatter => Self::Scatter,
            CollectiveKind::AllToAll => Self::AllToAll,
            CollectiveKind::Scan => Self::Scan,
            CollectiveKind::ExclusiveScan => Self::ExclusiveScan,
            CollectiveKind::Barrier => Self::Barrier,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A collective call, as all of its ranks must agree on it. A transport's [`Fingerprint`] encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Call {
    /// The number of the communicator's channel.
    pub channel: u64,
    /// The sequence number, which increases with each collective of this communicator; 0 for messages, which are
    /// not counted. Errors show the [number among the user's calls](Self::user_number).
    pub sequence: u64,
    /// The operation.
    pub operation: Operation,
    /// The type of the elements, if it moves any.
    pub element: Option<ElementType>,
    /// The number of elements: of the buffer, of one part if all parts have the same size, or of all parts together
    /// otherwise. For an announced call, it is the first eight bytes of its name. For a message, only its two ranks
    /// know the count; it is not part of the fingerprint, because the transport compares lengths. For elements
    /// without a [`DType`] it is less than 2⁴⁰.
    pub count: u64,
    /// A digest of sizes that the count does not contain: the sizes of all ranks' parts if they may differ, of many
    /// buffers, or of an array's axes. It is 0 if there are none. For an announced call, it is the other eight
    /// bytes of its name. For a message, it is the [tag](Self::tag).
    pub sizes: u64,
    /// The reduction, if there is one.
    pub op: Option<ReduceKind>,
    /// The rank in the world that it starts from or ends at, if there is one. For a message, it is the sender, if
    /// it is known.
    pub root: Option<u32>,
    /// The algorithm, if the operation has more than one and is not executed by a library below the transport.
    pub algorithm: Option<Algorithm>,
    /// The order of the reduction, if there is one.
    pub order: Option<ReductionOrder>,
    /// The digest of the communicator's earlier calls. For an announced call, it is a digest of its kind.
    pub(crate) past: HistoryDigest,
    /// `true` if the ranks found out before this call which memory they share. Some ranks do so at the beginning of
    /// their first call.
    pub(crate) after_agreement: bool,
}

impl Call {
    /// Returns the announced call of this kind and name with number `sequence` among announced calls.
    pub(crate) fn announced(channel: u64, sequence: u64, kind: &str, name: &str) -> Self {
        // FNV-1a, which is the same on every rank.
        let kind = kind
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        let name: [u8; 16] = std::array::from_fn(|index| name.as_bytes().get(index).copied().unwrap_or(0));
        Self {
            channel,
            sequence,
            operation: Operation::Announced,
            element: None,
            count: u64::from_le_bytes(word(&name, 0)),
            sizes: u64::from_le_bytes(word(&name, 8)),
            op: None,
            root: None,
            algorithm: None,
            order: None,
            past: HistoryDigest::from_bytes(u64::from(kind).to_le_bytes()),
            after_agreement: false,
        }
    }

    /// Returns the announced name, for example `step`, if this is an announced call.
    pub fn announced_name(&self) -> Option<String> {
        let bytes = [self.count.to_le_bytes(), self.sizes.to_le_bytes()].concat();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        let name = String::from_utf8_lossy(&bytes[..end]).into_owned();
        (self.operation == Operation::Announced).then_some(name)
    }

    /// Returns the tag, if this is a message.
    pub fn tag(&self) -> Option<u32> {
        let tag = u32::try_from(self.sizes).ok();
        tag.filter(|_| self.operation == Operation::Message)
    }

    /// Returns the step of a window, if this is a window.
    fn window_step(&self) -> Option<WindowStep> {
        let step = WindowStep::ALL.into_iter().find(|&step| step as u64 == self.sizes);
        step.filter(|_| self.operation == Operation::Window)
    }

    /// Returns the number of the call among those that the user has made on this communicator, counted from 1.
    /// Returns `None` for messages, which are not counted, and for calls that measure costs.
    pub fn user_number(&self) -> Option<u64> {
        let is_of_user = self.operation != Operation::Message && !self.is_internal();
        is_of_user.then(|| self.user_calls_before() + 1)
    }

    /// Returns the number of collectives that the user has made before it on this communicator.
    pub(crate) fn user_calls_before(&self) -> u64 {
        match self.operation {
            Operation::Announced => self.sequence,
            _ => user_calls_before(self.sequence),
        }
    }

    fn is_internal(&self) -> bool {
        self.operation != Operation::Announced && is_internal(self.sequence)
    }

    /// Returns a message about the first difference between the calls of two ranks, with advice. `one` and `other`
    /// name the ranks. Returns `None` if only earlier calls or the sizes of parts differ, which a call contains as
    /// digests.
    pub(crate) fn difference((one, first): (&str, &Self), (other, second): (&str, &Self)) -> Option<String> {
        const SAME_CALLS: &str = "all ranks must make the same calls in the same order";
        let (what, of_first, of_second, advice) = first.field_that_differs(second)?;
        let advice = match (advice, first.operation) {
            ("", _) => SAME_CALLS.to_owned(),
            (field, Operation::Message) => format!("sender and receiver must pass the same {field}"),
            (field, _) => format!("all ranks must pass the same {field}"),
        };
        Some(format!("{what} differ: {one} has {of_first}, {other} has {of_second}; {advice}"))
    }

    /// Returns the first field in which two calls differ: its name, its value in both calls, and the name of the
    /// argument that sets it.
    fn field_that_differs(&self, other: &Self) -> Option<(&'static str, String, String, &'static str)> {
        fn differ<T: PartialEq>(one: T, other: T, text: impl Fn(T) -> String) -> Option<(String, String)> {
            (one != other).then(|| (text(one), text(other)))
        }
        fn named<T: fmt::Display>(value: Option<T>) -> String {
            value.map_or_else(|| "none".to_owned(), |value| value.to_string())
        }
        let calls = [self.operation, other.operation];
        if calls.contains(&Operation::Announced) {
            return None;
        }
        let elements = |count: u64| format!("{count} {}", if count == 1 { "element" } else { "elements" });
        // The digest contains the name of the operation.
        let custom = differ(self.sizes, other.sizes, |digest| format!("custom operation {digest:016x}"))
            .filter(|_| self.op == Some(ReduceKind::Custom));
        // The library below a transport has algorithms of its own.
        let algorithm =
            |algorithm: Option<Algorithm>| algorithm.map_or("that of a library", Algorithm::name).to_owned();
        let fields = [
            ("calls", differ(calls[0], calls[1], |operation| operation.to_string()), ""),
            ("types", differ(self.element, other.element, named), "type"),
            ("tags", differ(self.tag(), other.tag(), named), "tag"),
            ("lengths", differ(self.count, other.count, elements), "length"),
            ("reductions", differ(self.op, other.op, named), "reduction"),
            ("operations", custom, "operation, of the same name, and lengths"),
            ("roots", differ(self.root, other.root, named), "root"),
            ("calls of a window", differ(self.window_step(), other.window_step(), named), ""),
            ("orders", differ(self.order, other.order, named), "order of reduction"),
            (
                "algorithms",
                differ(self.algorithm, other.algorithm, algorithm),
                "algorithm and DIST_CROSSOVERS",
            ),
        ];
        fields.into_iter().find_map(|(what, values, argument)| {
            values.map(|(of_first, of_second)| (what, of_first, of_second, argument))
        })
    }

    /// Encodes the call as bytes.
    ///
    /// The first eight bytes are the call's number, little-endian. It is 0 for messages. For announced calls it is
    /// the sequence number plus 1 plus 2⁶³. Otherwise it is the sequence number plus 1. The next eight bytes are the
    /// channel. The highest bit of the last byte says if the ranks know their shared memory; its other bits encode the
    /// algorithm.
    ///
    /// The count and the sender of a message are left out, so all messages of a type and a tag have the same encoding. A
    /// message contains no digest of earlier calls, because the other ranks do not know of it.
    pub fn encode(&self) -> Fingerprint {
        self.encode_with(ALGORITHMS)
    }

    /// Encodes the call like [`encode`](Self::encode), with the number that its algorithm has in this table.
    pub(crate) fn encode_with(&self, table: AlgorithmTable<'_>) -> Fingerprint {
        let mut bytes = [0; Fingerprint::SIZE];
        let (count, root, past) = match self.operation {
            Operation::Message => (0, None, HistoryDigest::default()),
            _ => (self.count, self.root, self.past),
        };
        bytes[0..8].copy_from_slice(&self.number().to_le_bytes());
        bytes[8..16].copy_from_slice(&self.channel.to_le_bytes());
        bytes[PAST].copy_from_slice(&past.to_bytes());
        let layout = self.element.map_or(0, ElementType::layout);
        bytes[24..32].copy_from_slice(&(count | layout << COUNT_BITS).to_le_bytes());
        // The complement of a tag follows the tag, so that a changed byte is not another tag.
        let sizes = match self.operation {
            Operation::Message => self.sizes | !self.sizes << 32,
            _ => self.sizes,
        };
        bytes[32..40].copy_from_slice(&sizes.to_le_bytes());
        let root = root.map_or(0, |root| root.checked_add(1).expect("a world has fewer than 2^32 - 1 ranks"));
        bytes[40..44].copy_from_slice(&root.to_le_bytes());
        bytes[44] = code(&Operation::ALL, Some(self.operation));
        bytes[45] = code_of_element(self.element) | (code(&ReduceKind::ALL, self.op) << 4);
        bytes[46] = code(&ReductionOrder::ALL, self.order) | (VERSION << 2);
        bytes[ALGORITHM] = code_of_algorithm(table, self.algorithm) | (u8::from(self.after_agreement) << 7);
        Fingerprint(bytes)
    }

    /// Patches the number and the history of the next call in an encoded collective.
    #[inline]
    pub(crate) fn patch(Fingerprint(bytes): &mut Fingerprint, history: &History) {
        let number = number_of_collective(history.sequence()).to_le_bytes();
        let past = history.past().to_bytes();
        // Bytes that are already correct are not written, because a following copy of the whole fingerprint would
        // wait for the store.
        if bytes[0..8] != number {
            bytes[0..8].copy_from_slice(&number);
        }
        if bytes[PAST] != past {
            bytes[PAST].copy_from_slice(&past);
        }
    }

    /// Returns the call without its number and its history.
    pub(crate) fn without_history(&self) -> Self {
        Self { sequence: 0, past: HistoryDigest::default(), ..*self }
    }

    /// Returns the call's number as the fingerprint encodes it; 0 for messages.
    #[inline]
    pub(crate) const fn number(&self) -> u64 {
        match self.operation {
            Operation::Message => 0,
            Operation::Announced => number_of_collective(self.sequence) | ANNOUNCED,
            _ => number_of_collective(self.sequence),
        }
    }

    /// Decodes a call. Returns `None` if the bytes encode no call, for example if the peer has another version of
    /// this crate.
    pub fn decode(fingerprint: &Fingerprint) -> Option<Self> {
        let bytes = &fingerprint.0;
        if bytes[46] >> 2 != VERSION {
            return None;
        }
        let operation = decoded(&Operation::ALL, bytes[44])??;
        let algorithm = match bytes[ALGORITHM] & 0x7f {
            0 => None,
            code => Some(operation.algorithms().nth(usize::from(code) - 1)?),
        };
        let (element, count) = decoded_element(bytes[45] & 0xf, u64::from_le_bytes(word(bytes, 24)))?;
        let number = u64::from_le_bytes(word(bytes, 0));
        let sizes = u64::from_le_bytes(word(bytes, 32));
        let sizes = if operation == Operation::Message { sizes & u64::from(u32::MAX) } else { sizes };
        let sequence = match operation {
            Operation::Message => 0,
            Operation::Announced => (number & !ANNOUNCED).wrapping_sub(1),
            _ => number.wrapping_sub(1),
        };
        let call = Self {
            channel: u64::from_le_bytes(word(bytes, 8)),
            sequence,
            operation,
            element,
            count,
            sizes,
            op: decoded(&ReduceKind::ALL, bytes[45] >> 4)?,
            root: u32::from_le_bytes(word(bytes, 40)).checked_sub(1),
            algorithm,
            order: decoded(&ReductionOrder::ALL, bytes[46] & 3)?,
            past: HistoryDigest::from_bytes(word(bytes, PAST.start)),
            after_agreement: bytes[ALGORITHM] >> 7 == 1,
        };
        // Other bytes belong to a version that this one does not know.
        (call.encode() == *fingerprint).then_some(call)
    }
}

impl fmt::Display for Call {
    /// Writes the call, for example `all_reduce (call 18) of 1000 f32 (sum, canonical, halving_doubling)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = self.announced_name() {
            return write!(f, "{name} (call {})", self.user_calls_before() + 1);
        }
        write!(f, "{}", self.operation)?;
        let is_message = self.operation == Operation::Message;
        if let Some(number) = self.user_number() {
            write!(f, " (call {number})")?;
        } else if !is_message {
            f.write_str(" (to measure costs)")?;
        }
        match self.element {
            Some(element) if is_message && self.count == 0 => write!(f, " of {element}")?,
            Some(element) => write!(f, " of {} {element}", self.count)?,
            None => {}
        }
        let mut separator = " (";
        let mut detail = |f: &mut fmt::Formatter<'_>, detail: fmt::Arguments<'_>| {
            let written = write!(f, "{separator}{detail}");
            separator = ", ";
            written
        };
        if let Some(op) = self.op {
            detail(f, format_args!("{op}"))?;
        }
        if is_message && self.sizes != 0 {
            detail(f, format_args!("tag {}", self.sizes))?;
        } else if let Some(step) = self.window_step().filter(|&step| step != WindowStep::Open) {
            detail(f, format_args!("{step}"))?;
        } else if self.sizes != 0 {
            detail(f, format_args!("sizes {:016x}", self.sizes))?;
        }
        if let Some(root) = self.root {
            let ends_there = matches!(self.operation, Operation::Reduce | Operation::Gather);
            let direction = if ends_there { "to" } else { "from" };
            detail(f, format_args!("{direction} rank {root}"))?;
        }
        if let Some(order) = self.order {
            detail(f, format_args!("{order}"))?;
        }
        if let Some(algorithm) = self.algorithm {
            detail(f, format_args!("{algorithm}"))?;
        }
        if separator == ", " { f.write_str(")") } else { Ok(()) }
    }
}

/// The bit that marks the number of an announced call.
const ANNOUNCED: u64 = 1 << 63;

/// Returns the number of a collective as its fingerprint encodes it.
const fn number_of_collective(sequence: u64) -> u64 {
    sequence.wrapping_add(1)
}

/// A call of a window that all ranks make together. It is the `sizes` of the call, and is named after the method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowStep {
    /// Opens a window for reading.
    Open,
    /// Opens a window for updates.
    OpenUpdates,
    /// Ends an epoch, and begins the next one.
    Fence,
    /// Closes a window.
    Close,
}

impl WindowStep {
    const ALL: [Self; 4] = [Self::Open, Self::OpenUpdates, Self::Fence, Self::Close];
}

impl fmt::Display for WindowStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::OpenUpdates => "open_updates",
            Self::Fence => "fence",
            Self::Close => "close",
        })
    }
}

/// The byte that marks every fingerprint of this version.
const VERSION: u8 = 7;

/// The position of the history digest.
const PAST: Range<usize> = 16..24;

/// The position of the algorithm, which shares its byte with a flag.
pub(crate) const ALGORITHM: usize = 47;

/// The code of element types that have no [`DType`].
const OTHER_ELEMENT: u8 = 15;

/// The number of bits of the count of a call on elements without a [`DType`]. The higher bits hold the layout of an
/// element.
pub(crate) const COUNT_BITS: u32 = u64::BITS - LAYOUT_BITS;

const _: () = assert!(
    DType::ALL.len() < OTHER_ELEMENT as usize && ReduceKind::ALL.len() < 16 && ReductionOrder::ALL.len() < 4
);

/// Returns the value's position in the list, counted from 1; 0 for none.
fn code<T: Copy + PartialEq>(all: &[T], value: Option<T>) -> u8 {
    value.map_or(0, |value| {
        small(1 + all.iter().position(|&other| other == value).expect("ALL lists every variant"))
    })
}

fn code_of_element(element: Option<ElementType>) -> u8 {
    match element {
        Some(ElementType::Other { .. }) => OTHER_ELEMENT,
        element => code(&DType::ALL, element.and_then(ElementType::dtype)),
    }
}

/// Returns the type of the elements and their count. Returns `None` for an invalid code or layout.
fn decoded_element(code: u8, count: u64) -> Option<(Option<ElementType>, u64)> {
    if code == OTHER_ELEMENT {
        let element = ElementType::from_layout(count >> COUNT_BITS)?;
        return Some((Some(element), count & ((1 << COUNT_BITS) - 1)));
    }
    Some((decoded(&DType::ALL, code)?.map(ElementType::Known), count))
}

/// Returns the algorithm's position among the table's algorithms of its operation, counted from 1; 0 for none.
pub(crate) fn code_of_algorithm(table: AlgorithmTable<'_>, algorithm: Option<Algorithm>) -> u8 {
    algorithm.map_or(0, |algorithm| {
        let position = table.of(algorithm.collective()).position(|other| other == algorithm);
        small(1 + position.expect("calls use algorithms of the table"))
    })
}

/// Returns `None` for an invalid code, `Some(None)` for 0.
fn decoded<T: Copy>(all: &[T], code: u8) -> Option<Option<T>> {
    match usize::from(code).checked_sub(1) {
        None => Some(None),
        Some(index) => all.get(index).copied().map(Some),
    }
}

fn small(number: usize) -> u8 {
    u8::try_from(number).expect("the lists are short")
}

fn word<const N: usize>(bytes: &[u8], start: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[start + index])
}

#[cfg(test)]
mod tests {
    use dist_algos::{halving_doubling, ring};
    use proptest::prelude::*;

    use super::*;

    const SUM: Call = Call {
        channel: 0,
        sequence: 17,
        operation: Operation::AllReduce,
        element: Some(ElementType::Known(DType::F32)),
        count: 1000,
        sizes: 0,
        op: Some(ReduceKind::Sum),
        root: None,
        algorithm: Some(Algorithm::Messages(&halving_doubling::ALL_REDUCE)),
        order: Some(ReductionOrder::Canonical),
        past: NOTHING,
        after_agreement: false,
    };
    const PAIR: ElementType = ElementType::Other { size: 24, align: 8 };
    const NOTHING: HistoryDigest = HistoryDigest::from_bytes([0; 8]);
    const SOMETHING: HistoryDigest = HistoryDigest::from_bytes([1, 2, 3, 4, 5, 6, 7, 8]);

    #[test]
    fn calls_read_as_a_person_would_say_them() {
        assert_eq!(SUM.to_string(), "all_reduce (call 18) of 1000 f32 (sum, canonical, halving_doubling)");
        let none = Call { element: None, op: None, algorithm: None, order: None, ..SUM };
        assert_eq!(Call { operation: Operation::Barrier, ..none }.to_string(), "barrier (call 18)");
        let message =
            Call { operation: Operation::Message, root: Some(3), element: Some(DType::U8.into()), ..none };
        assert_eq!(message.to_string(), "message of 1000 u8 (from rank 3)");
        assert_eq!(Call { sizes: 7, ..message }.to_string(), "message of 1000 u8 (tag 7, from rank 3)");
        let announced = Call::announced(7, 3, "step", "clip_gradients");
        assert_eq!(announced.to_string(), "clip_gradients (call 4)");
        assert_eq!(Call::decode(&announced.encode()), Some(announced));
        let reduce = Call { operation: Operation::Reduce, root: Some(2), algorithm: None, ..SUM };
        assert_eq!(reduce.to_string(), "reduce (call 18) of 1000 f32 (sum, to rank 2, canonical)");
    }

    #[test]
    fn the_difference_of_two_calls_names_what_differs_on_each_rank_and_what_to_do() {
        let of = |other: Call| Call::difference(("rank 1", &other), ("this rank", &SUM));
        let same = "all ranks must pass the same";
        let cases = [
            (Call { count: 1, ..SUM }, format!("lengths differ: rank 1 has 1 element, this rank has 1000 elements; {same} length")),
            (Call { element: Some(DType::F64.into()), ..SUM }, format!("types differ: rank 1 has f64, this rank has f32; {same} type")),
            (Call { element: Some(PAIR), ..SUM }, format!("types differ: rank 1 has elements of 24 bytes aligned to 8, this rank has f32; {same} type")),
            (Call { op: Some(ReduceKind::Max), ..SUM }, format!("reductions differ: rank 1 has max, this rank has sum; {same} reduction")),
            (Call { root: Some(2), ..SUM }, format!("roots differ: rank 1 has 2, this rank has none; {same} root")),
            (Call { order: Some(ReductionOrder::Any), ..SUM }, format!("orders differ: rank 1 has any, this rank has canonical; {same} order of reduction")),
            (Call { algorithm: Some(Algorithm::Messages(&ring::ALL_REDUCE)), ..SUM }, format!("algorithms differ: rank 1 has ring, this rank has halving_doubling; {same} algorithm and DIST_CROSSOVERS")),
            (Call { operation: Operation::Barrier, element: None, count: 0, ..SUM }, "calls differ: rank 1 has barrier, this rank has all_reduce; all ranks must make the same calls in the same order".to_owned()),
        ];
        for (other, expected) in cases {
            assert_eq!(of(other), Some(expected));
        }
        for hidden in
            [SUM, Call { past: SOMETHING, ..SUM }, Call { sizes: 3, ..SUM }, Call { sequence: 3, ..SUM }]
        {
            assert_eq!(of(hidden), None);
        }
        let message = Call { operation: Operation::Message, ..SUM };
        let text =
            Call::difference(("rank 1", &Call { count: 2, ..message }), ("this rank", &message)).unwrap();
        assert!(text.ends_with("sender and receiver must pass the same length"), "{text}");
    }

    #[test]
    fn bytes_of_another_version_are_no_call() {
        assert_eq!(Call::decode(&Fingerprint::NONE), None);
        let codes = [
            (44, 0),
            (44, 99),
            (45, 0xe),
            (45, 0xf),
            (45, 0xf0),
            (46, 3 << 2 | 1),
            (46, 5 << 2 | 3),
            (47, 99),
        ];
        let message = Call { operation: Operation::Message, op: None, algorithm: None, order: None, ..SUM };
        let of_sum = codes.into_iter().map(|place| (SUM, place));
        let of_message = [(0, 1), (16, 1), (24, 1), (32, 9), (36, 9), (40, 1)].map(|place| (message, place));
        for (call, (place, value)) in of_sum.chain(of_message) {
            let mut fingerprint = call.encode();
            assert!(Call::decode(&fingerprint).is_some());
            fingerprint.0[place] = value;
            assert_eq!(Call::decode(&fingerprint), None, "byte {place}");
        }
    }

    #[test]
    fn every_field_is_in_the_fingerprint() {
        let others = [
            Call { channel: 1, ..SUM },
            Call { sequence: 18, ..SUM },
            Call { operation: Operation::Reduce, algorithm: None, ..SUM },
            Call { element: Some(DType::I32.into()), ..SUM },
            Call { element: Some(PAIR), ..SUM },
            Call { element: Some(ElementType::Other { size: 24, align: 4 }), ..SUM },
            Call { element: Some(ElementType::Other { size: 32, align: 8 }), ..SUM },
            Call { count: 1001, ..SUM },
            Call { sizes: 1, ..SUM },
            Call { op: Some(ReduceKind::Max), ..SUM },
            Call { root: Some(0), ..SUM },
            Call { algorithm: Some(Algorithm::Messages(&ring::ALL_REDUCE)), ..SUM },
            Call { order: Some(ReductionOrder::Any), ..SUM },
            Call { past: SOMETHING, ..SUM },
            Call { after_agreement: true, ..SUM },
        ];
        for other in others {
            assert_ne!(other.encode(), SUM.encode(), "{other:?}");
            assert_eq!(Call::decode(&other.encode()), Some(other));
        }
    }

    #[test]
    fn the_number_of_a_collective_comes_first_and_a_message_has_none() {
        assert_eq!(SUM.encode().0[..8], 18_u64.to_le_bytes());
        let message = Call { operation: Operation::Message, algorithm: None, ..SUM };
        assert_eq!(message.encode().0[..8], [0; 8]);
    }

    #[test]
    fn all_messages_of_a_type_and_a_tag_look_alike() {
        let message = Call { operation: Operation::Message, algorithm: None, op: None, order: None, ..SUM };
        let other = Call { count: 3, root: Some(1), sequence: 4, past: SOMETHING, ..message };
        assert_eq!(other.encode(), message.encode());
        assert_ne!(Call { element: Some(DType::U8.into()), ..other }.encode(), message.encode());
        assert_eq!(Call::decode(&other.encode()).unwrap().to_string(), "message of f32");
    }

    proptest! {
        #[test]
        fn decoding_undoes_encoding(
            (channel, sequence, count, sizes) in any::<(u64, u64, u64, u64)>(),
            root in prop::option::of(0..u32::MAX),
            operation in prop::sample::select(&Operation::ALL),
            element in prop::option::of(prop_oneof![
                prop::sample::select(&DType::ALL).prop_map(ElementType::Known),
                (1_u32..1 << 21, 0_u8..7).prop_map(|(size, log2)| ElementType::Other { size, align: 1 << log2 }),
            ]),
            op in prop::option::of(prop::sample::select(&ReduceKind::ALL)),
            order in prop::option::of(prop::sample::select(&ReductionOrder::ALL)),
            algorithm in 0_usize..9,
            (past, after_agreement) in any::<([u8; 8], bool)>(),
        ) {
            let algorithm = operation.algorithms().nth(algorithm);
            let is_other = matches!(element, Some(ElementType::Other { .. }));
            let count = if is_other { count >> LAYOUT_BITS } else { count };
            let sizes = if operation == Operation::Message { sizes >> 32 } else { sizes };
            let (sequence, past) = (sequence >> 9, HistoryDigest::from_bytes(past));
            let call = Call {
                channel, sequence, operation, element, count, sizes, op, root, algorithm, order, past, after_agreement,
            };
            let told = match operation {
                Operation::Message => Call { sequence: 0, count: 0, root: None, past: NOTHING, ..call },
                Operation::Announced => {
                    Call { sequence: (sequence.wrapping_add(1) & !ANNOUNCED).wrapping_sub(1), ..call }
                }
                _ => call,
            };
            prop_assert_eq!(Call::decode(&call.encode()), Some(told));
        }

        #[test]
        fn any_bytes_decode_to_a_call_or_to_nothing(bytes in any::<[[u8; 16]; 3]>()) {
            let fingerprint = Fingerprint(bytemuck::cast(bytes));
            if let Some(call) = Call::decode(&fingerprint) {
                prop_assert_eq!(call.encode(), fingerprint);
            }
        }
    }
}

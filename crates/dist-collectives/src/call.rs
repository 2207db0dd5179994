//! What says which call a rank is in, and how it travels as a fingerprint.

use std::fmt;

use dist_transport::Fingerprint;

use crate::{Algorithm, DType, ReduceKind, ReductionOrder};

/// What the ranks of a group do together.
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
    /// Nobody leaves before all have come.
    Barrier,
    /// Nobody leaves before all have come, or before it is known who has not.
    MonitoredBarrier,
    /// One rank sends to another.
    Message,
    /// Every rank may read every rank's buffer, until all have closed theirs.
    Window,
    /// Something that is made of many calls, such as a step of a training, of which the ranks have
    /// [announced](crate::Communicator::announce) that they begin it.
    Announced,
}

impl Operation {
    /// Every operation.
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

    /// The name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Scan => "scan",
            Self::ExclusiveScan => "exclusive_scan",
            Self::Barrier => "barrier",
            Self::MonitoredBarrier => "monitored_barrier",
            Self::Message => "message",
            Self::Window => "window",
            Self::Announced => "announced",
        }
    }

    /// The operation of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.name() == name)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A call of a collective, as all of its ranks must agree on it: what a transport's [`Fingerprint`] encodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Call {
    /// The number of the channel that the group communicates on.
    pub channel: u64,
    /// How many operations came before it on this communicator; 0 for messages, which are not counted.
    pub sequence: u64,
    /// What is done.
    pub operation: Operation,
    /// The type of the elements, if it moves any.
    pub dtype: Option<DType>,
    /// How many elements the call is about: of the buffer; of one part, where every rank has a part of the same size;
    /// of all parts together, where the sizes differ. Of an announced call, the first eight bytes of its name. Of a message it is known to the ranks that it is between, but
    /// stands in no fingerprint: the transport compares lengths.
    pub count: u64,
    /// A digest of the sizes that the count does not tell: those of all ranks' parts where they may differ, of many
    /// buffers, of an array's axes; 0 where there are none. Of an announced call, the other eight bytes of its name.
    pub sizes: u64,
    /// How elements are reduced, if they are.
    pub op: Option<ReduceKind>,
    /// The rank that it starts from or ends at, if there is one, by its number in the world: the sender of a message, as far
    /// as it is known.
    pub root: Option<u32>,
    /// How it is done, if there is more than one way.
    pub algorithm: Option<Algorithm>,
    /// In which order it reduces, if it does.
    pub order: Option<ReductionOrder>,
    /// How many forks and subgroups of this communicator were made before it; 0 for messages, which need not agree in that. Of
    /// an announced call, a digest of its kind.
    pub children: u32,
    /// Whether the ranks have found out before it what they share, which has a number as a call has.
    pub(crate) after_agreement: bool,
}

impl Call {
    /// The call of this kind and name that ranks announce, number `sequence` of those.
    pub(crate) fn announced(channel: u64, sequence: u64, kind: &str, name: &str) -> Self {
        // FNV-1a, the same on every rank.
        let kind = kind
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        let name: [u8; 16] = std::array::from_fn(|index| name.as_bytes().get(index).copied().unwrap_or(0));
        Self {
            channel,
            sequence,
            operation: Operation::Announced,
            dtype: None,
            count: u64::from_le_bytes(word(&name, 0)),
            sizes: u64::from_le_bytes(word(&name, 8)),
            op: None,
            root: None,
            algorithm: None,
            order: None,
            children: kind,
            after_agreement: false,
        }
    }

    /// What was announced, such as `step`, if this is such a call.
    pub fn announced_name(&self) -> Option<String> {
        let bytes = [self.count.to_le_bytes(), self.sizes.to_le_bytes()].concat();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        let name = String::from_utf8_lossy(&bytes[..end]).into_owned();
        (self.operation == Operation::Announced).then_some(name)
    }

    /// The call as bytes.
    ///
    /// The first eight are the call's number among the collectives of its group, little-endian and counted from 1:
    /// two ranks whose calls have one number and differ in another byte can never agree. They are 0 for messages. That the
    /// ranks agree on what they share has a number too, before the first call that wants to know.
    /// What a message has for itself, its count and its sender, is left out: all messages of a type look alike.
    pub fn encode(&self) -> Fingerprint {
        let mut bytes = [0; Fingerprint::SIZE];
        let (count, root, children) = match self.operation {
            Operation::Message => (0, None, 0),
            _ => (self.count, self.root, self.children),
        };
        bytes[0..8].copy_from_slice(&self.number().to_le_bytes());
        bytes[8] = VERSION;
        bytes[9] = code(&Operation::ALL, Some(self.operation));
        bytes[10] = code(&DType::ALL, self.dtype);
        bytes[11] = code(&ReduceKind::ALL, self.op);
        bytes[12] = code(&ReductionOrder::ALL, self.order);
        bytes[13] = self.algorithm.map_or(0, |algorithm| small(algorithm.index() + 1));
        bytes[14] = u8::from(root.is_some());
        bytes[15] = u8::from(self.after_agreement);
        bytes[16..24].copy_from_slice(&self.channel.to_le_bytes());
        bytes[24..32].copy_from_slice(&count.to_le_bytes());
        bytes[32..36].copy_from_slice(&children.to_le_bytes());
        bytes[36..40].copy_from_slice(&root.unwrap_or(0).to_le_bytes());
        bytes[40..48].copy_from_slice(&self.sizes.to_le_bytes());
        Fingerprint(bytes)
    }

    /// Makes of what a call encodes that differs from this one by its number only what this one does.
    #[inline]
    pub(crate) fn renumber(&self, Fingerprint(bytes): &mut Fingerprint) {
        let number = self.number().to_le_bytes();
        // Where it stands already, to write it again would make the copy of the whole that follows wait.
        if bytes[0..8] != number {
            bytes[0..8].copy_from_slice(&number);
        }
    }

    /// The call's number among the collectives of its group, counted from 1, or from 2⁶³ + 1 if it is announced; 0 for messages.
    pub(crate) const fn number(&self) -> u64 {
        match self.operation {
            Operation::Message => 0,
            Operation::Announced => self.sequence.wrapping_add(1) | ANNOUNCED,
            _ => self.sequence.wrapping_add(1 + self.after_agreement as u64),
        }
    }

    /// The call that these bytes encode; `None` if they encode none, as those of a peer with another version of
    /// this crate may not.
    pub fn decode(fingerprint: &Fingerprint) -> Option<Self> {
        let bytes = &fingerprint.0;
        if bytes[8] != VERSION {
            return None;
        }
        let operation = decoded(&Operation::ALL, bytes[9])??;
        let algorithm = match bytes[13] {
            0 => None,
            code => Some(Algorithm::nth(operation, usize::from(code) - 1)?),
        };
        let after_agreement = bytes[15] == 1;
        let call = Self {
            channel: u64::from_le_bytes(word(bytes, 16)),
            sequence: match operation {
                Operation::Message => 0,
                Operation::Announced => (u64::from_le_bytes(word(bytes, 0)) & !ANNOUNCED).wrapping_sub(1),
                _ => u64::from_le_bytes(word(bytes, 0)).wrapping_sub(1 + u64::from(after_agreement)),
            },
            operation,
            dtype: decoded(&DType::ALL, bytes[10])?,
            count: u64::from_le_bytes(word(bytes, 24)),
            sizes: u64::from_le_bytes(word(bytes, 40)),
            op: decoded(&ReduceKind::ALL, bytes[11])?,
            root: (bytes[14] == 1).then(|| u32::from_le_bytes(word(bytes, 36))),
            algorithm,
            order: decoded(&ReductionOrder::ALL, bytes[12])?,
            children: u32::from_le_bytes(word(bytes, 32)),
            after_agreement,
        };
        // Whatever else the bytes hold belongs to a version that this one does not know.
        (call.encode() == *fingerprint).then_some(call)
    }
}

impl fmt::Display for Call {
    /// As in `all_reduce #17 of 1000 f32 (sum, canonical, halving_doubling)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = self.announced_name() {
            return write!(f, "{name} #{}", self.sequence);
        }
        write!(f, "{}", self.operation)?;
        let is_message = self.operation == Operation::Message;
        if !is_message {
            write!(f, " #{}", self.sequence)?;
        }
        match self.dtype {
            Some(dtype) if is_message && self.count == 0 => write!(f, " of {dtype}")?,
            Some(dtype) => write!(f, " of {} {dtype}", self.count)?,
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
        if self.sizes != 0 {
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

/// What marks the number of an announced call.
const ANNOUNCED: u64 = 1 << 63;

/// What marks every fingerprint of this version.
const VERSION: u8 = 4;

/// The value's place in the list, counted from 1; 0 for none.
fn code<T: Copy + PartialEq>(all: &[T], value: Option<T>) -> u8 {
    value.map_or(0, |value| {
        small(1 + all.iter().position(|&other| other == value).expect("ALL lists every variant"))
    })
}

/// `None` for a code that means nothing, `Some(None)` for 0.
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
    use dist_algos::AllReduce;
    use proptest::prelude::*;

    use super::*;

    const SUM: Call = Call {
        channel: 0,
        sequence: 17,
        operation: Operation::AllReduce,
        dtype: Some(DType::F32),
        count: 1000,
        sizes: 0,
        op: Some(ReduceKind::Sum),
        root: None,
        algorithm: Some(Algorithm::AllReduce(AllReduce::HalvingDoubling)),
        order: Some(ReductionOrder::Canonical),
        children: 0,
        after_agreement: false,
    };

    #[test]
    fn calls_read_as_a_person_would_say_them() {
        assert_eq!(SUM.to_string(), "all_reduce #17 of 1000 f32 (sum, canonical, halving_doubling)");
        let none = Call { dtype: None, op: None, algorithm: None, order: None, ..SUM };
        assert_eq!(Call { operation: Operation::Barrier, ..none }.to_string(), "barrier #17");
        let message = Call { operation: Operation::Message, root: Some(3), dtype: Some(DType::U8), ..none };
        assert_eq!(message.to_string(), "message of 1000 u8 (from rank 3)");
        let announced = Call::announced(7, 3, "step", "clip_gradients");
        assert_eq!(announced.to_string(), "clip_gradients #3");
        assert_eq!(Call::decode(&announced.encode()), Some(announced));
        let reduce = Call { operation: Operation::Reduce, root: Some(2), algorithm: None, ..SUM };
        assert_eq!(reduce.to_string(), "reduce #17 of 1000 f32 (sum, to rank 2, canonical)");
    }

    #[test]
    fn bytes_of_another_version_are_no_call() {
        assert_eq!(Call::decode(&Fingerprint::NONE), None);
        let codes = [(8, 1), (9, 0), (9, 99), (10, 99), (11, 99), (12, 99), (13, 99), (14, 2), (15, 2)];
        let unused = [(36, 1)];
        let message = Call { operation: Operation::Message, op: None, algorithm: None, order: None, ..SUM };
        let of_sum = codes.into_iter().chain(unused).map(|place| (SUM, place));
        for (call, (place, value)) in of_sum.chain([(message, (32, 1))]) {
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
            Call { dtype: Some(DType::I32), ..SUM },
            Call { count: 1001, ..SUM },
            Call { sizes: 1, ..SUM },
            Call { op: Some(ReduceKind::Max), ..SUM },
            Call { root: Some(0), ..SUM },
            Call { algorithm: Some(Algorithm::AllReduce(AllReduce::Ring)), ..SUM },
            Call { order: Some(ReductionOrder::Any), ..SUM },
            Call { children: 1, ..SUM },
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
        assert_eq!(Call { after_agreement: true, ..SUM }.encode().0[..8], 19_u64.to_le_bytes());
        let message = Call { operation: Operation::Message, algorithm: None, ..SUM };
        assert_eq!(message.encode().0[..8], [0; 8]);
    }

    #[test]
    fn all_messages_of_a_type_look_alike() {
        let message = Call { operation: Operation::Message, algorithm: None, op: None, order: None, ..SUM };
        let other = Call { count: 3, root: Some(1), sequence: 4, children: 2, ..message };
        assert_eq!(other.encode(), message.encode());
        assert_ne!(Call { dtype: Some(DType::U8), ..other }.encode(), message.encode());
        assert_eq!(Call::decode(&other.encode()).unwrap().to_string(), "message of f32");
    }

    proptest! {
        #[test]
        fn decoding_undoes_encoding(
            (channel, sequence, count, sizes) in any::<(u64, u64, u64, u64)>(),
            root in any::<Option<u32>>(),
            operation in prop::sample::select(&Operation::ALL),
            dtype in prop::option::of(prop::sample::select(&DType::ALL)),
            op in prop::option::of(prop::sample::select(&ReduceKind::ALL)),
            order in prop::option::of(prop::sample::select(&ReductionOrder::ALL)),
            algorithm in 0_usize..9,
            (children, after_agreement) in any::<(u32, bool)>(),
        ) {
            let algorithm = Algorithm::of(operation).nth(algorithm);
            let call = Call {
                channel, sequence, operation, dtype, count, sizes, op, root, algorithm, order, children,
                after_agreement,
            };
            let told = match operation {
                Operation::Message => Call { sequence: 0, count: 0, root: None, children: 0, ..call },
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

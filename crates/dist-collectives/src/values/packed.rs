//! Sequences of numbers of one type, which are stored as bytes.

use std::cell::Cell;
use std::marker::PhantomData;
use std::slice::ChunksExact;

use bytemuck::Pod;
use serde::de::value::Error;
use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
use serde::ser::{Impossible, Serialize, Serializer};
use serde::{Deserializer, forward_to_deserialize_any};

/// A type of numbers. Its position is the type of the MessagePack extension that stores a sequence of them, as they are
/// in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NumberType {
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F32,
    F64,
}

/// A number that can be stored in a packed sequence.
pub(super) trait PackedNumber: Pod {
    /// The type.
    const TYPE: NumberType;

    /// Passes the number to a visitor.
    fn visit<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error>;
}

macro_rules! numbers {
    ($($number:ty => $type:ident, $visit:ident;)*) => {
        $(impl PackedNumber for $number {
            const TYPE: NumberType = NumberType::$type;

            #[inline]
            fn visit<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
                visitor.$visit(self)
            }
        })*

        impl NumberType {
            /// Returns the type of a MessagePack extension.
            pub(super) const fn code(self) -> i8 {
                self as i8
            }

            /// Passes numbers of the type with this code, which are stored in these bytes, to a visitor.
            ///
            /// # Errors
            /// If there is no such type, the bytes are not whole numbers, or the visitor leaves some numbers.
            pub(super) fn visit_packed<'de, V: Visitor<'de>>(
                code: i8,
                bytes: &[u8],
                visitor: V,
            ) -> Result<V::Value, Error> {
                $(if code == Self::$type.code() {
                    return Numbers::<$number>::visit(bytes, visitor);
                })*
                Err(Error::custom(format_args!("extension {code} is no sequence of numbers")))
            }

            /// Writes the next elements as long as they are numbers of this type. Returns how many were written, and the
            /// first other element.
            pub(super) fn write_all<T: Serialize>(
                self,
                elements: &mut impl Iterator<Item = T>,
                out: &mut Vec<u8>,
            ) -> (usize, Option<T>) {
                match self {
                    $(Self::$type => write_numbers::<$number, T>(elements, out),)*
                }
            }

            /// Calls `each` for every number of this type that is stored in these bytes.
            pub(super) fn for_each(self, bytes: &[u8], mut each: impl FnMut(Plain)) {
                match self {
                    $(Self::$type => for number in bytes.chunks_exact(size_of::<$number>()) {
                        each(bytemuck::pod_read_unaligned::<$number>(number).into());
                    })*
                }
            }
        }
    };
}

numbers! {
    i8 => I8, visit_i8;
    i16 => I16, visit_i16;
    i32 => I32, visit_i32;
    i64 => I64, visit_i64;
    u8 => U8, visit_u8;
    u16 => U16, visit_u16;
    u32 => U32, visit_u32;
    u64 => U64, visit_u64;
    f32 => F32, visit_f32;
    f64 => F64, visit_f64;
}

/// A number as MessagePack distinguishes it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Plain {
    Signed(i64),
    Unsigned(u64),
    Single(f32),
    Double(f64),
}

macro_rules! plain {
    ($($variant:ident: $($number:ty)*;)*) => {$($(
        impl From<$number> for Plain {
            #[inline]
            fn from(number: $number) -> Self {
                Self::$variant(number.into())
            }
        }
    )*)*};
}

plain! {
    Signed: i8 i16 i32 i64;
    Unsigned: u8 u16 u32 u64;
    Single: f32;
    Double: f64;
}

/// The number of elements that are written at a time.
const WRITTEN_AT_A_TIME: usize = 256;

/// See [`NumberType::write_all`].
fn write_numbers<N: PackedNumber, T: Serialize>(
    elements: &mut impl Iterator<Item = T>,
    out: &mut Vec<u8>,
) -> (usize, Option<T>) {
    let mut written = 0;
    loop {
        let (mut numbers, mut filled, mut other) = ([N::zeroed(); WRITTEN_AT_A_TIME], 0, None);
        for place in &mut numbers {
            let Some(element) = elements.next() else { break };
            let Ok(number) = element.serialize(OnlyNumber(PhantomData)) else {
                other = Some(element);
                break;
            };
            *place = number;
            filled += 1;
        }
        out.extend_from_slice(bytemuck::cast_slice(&numbers[..filled]));
        written += filled;
        if filled < WRITTEN_AT_A_TIME {
            return (written, other);
        }
    }
}

/// The numbers of a packed sequence that have not been read yet.
struct Numbers<'a, N> {
    rest: ChunksExact<'a, u8>,
    /// The number of unread numbers, after the visitor has dropped the sequence.
    unread: &'a Cell<usize>,
    number: PhantomData<N>,
}

impl<N> Drop for Numbers<'_, N> {
    fn drop(&mut self) {
        self.unread.set(self.rest.len());
    }
}

impl<N: PackedNumber> Numbers<'_, N> {
    fn visit<'de, V: Visitor<'de>>(bytes: &[u8], visitor: V) -> Result<V::Value, Error> {
        let size = size_of::<N>();
        if !bytes.len().is_multiple_of(size) {
            return Err(Error::custom("a packed sequence ends within a number"));
        }
        let unread = Cell::new(0);
        // The visitor owns the sequence, so that its state can be in registers.
        let numbers = Numbers::<N> { rest: bytes.chunks_exact(size), unread: &unread, number: PhantomData };
        let value = visitor.visit_seq(numbers)?;
        match unread.get() {
            0 => Ok(value),
            _ => Err(Error::invalid_length(bytes.len() / size, &"fewer elements")),
        }
    }
}

impl<'de, N: PackedNumber> SeqAccess<'de> for Numbers<'_, N> {
    type Error = Error;

    #[inline]
    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let next = self.rest.next();
        next.map(|bytes| seed.deserialize(OneNumber(bytemuck::pod_read_unaligned::<N>(bytes)))).transpose()
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.rest.len())
    }
}

/// One number of a packed sequence.
struct OneNumber<N>(N);

impl<'de, N: PackedNumber> Deserializer<'de> for OneNumber<N> {
    type Error = Error;

    #[inline]
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.0.visit(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    #[inline]
    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn is_human_readable(&self) -> bool {
        false
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct enum identifier ignored_any
    }
}

/// Serializes a number of one type to itself. Fails for any other value.
struct OnlyNumber<N>(PhantomData<N>);

impl<N: PackedNumber> OnlyNumber<N> {
    #[inline]
    fn number<M: PackedNumber>(number: M) -> Result<N, Error> {
        if M::TYPE == N::TYPE {
            Ok(bytemuck::pod_read_unaligned(bytemuck::bytes_of(&number)))
        } else {
            other()
        }
    }
}

#[cold]
fn other<T>() -> Result<T, Error> {
    Err(Error::custom("this is no number of the type of the sequence"))
}

macro_rules! numbers_only {
    ($($function:ident: $number:ty;)*) => {$(
        #[inline]
        fn $function(self, number: $number) -> Result<N, Error> {
            Self::number(number)
        }
    )*};
}

macro_rules! no_numbers {
    ($($function:ident($($argument:ty),*) -> $result:ty;)*) => {$(
        #[inline]
        fn $function(self, $(_: $argument),*) -> Result<$result, Error> {
            other()
        }
    )*};
}

impl<N: PackedNumber> Serializer for OnlyNumber<N> {
    type Ok = N;
    type Error = Error;
    type SerializeSeq = Impossible<N, Error>;
    type SerializeTuple = Impossible<N, Error>;
    type SerializeTupleStruct = Impossible<N, Error>;
    type SerializeTupleVariant = Impossible<N, Error>;
    type SerializeMap = Impossible<N, Error>;
    type SerializeStruct = Impossible<N, Error>;
    type SerializeStructVariant = Impossible<N, Error>;

    numbers_only! {
        serialize_i8: i8;
        serialize_i16: i16;
        serialize_i32: i32;
        serialize_i64: i64;
        serialize_u8: u8;
        serialize_u16: u16;
        serialize_u32: u32;
        serialize_u64: u64;
        serialize_f32: f32;
        serialize_f64: f64;
    }

    no_numbers! {
        serialize_i128(i128) -> N;
        serialize_u128(u128) -> N;
        serialize_bool(bool) -> N;
        serialize_char(char) -> N;
        serialize_str(&str) -> N;
        serialize_bytes(&[u8]) -> N;
        serialize_none() -> N;
        serialize_unit() -> N;
        serialize_unit_struct(&'static str) -> N;
        serialize_unit_variant(&'static str, u32, &'static str) -> N;
        serialize_seq(Option<usize>) -> Self::SerializeSeq;
        serialize_tuple(usize) -> Self::SerializeTuple;
        serialize_tuple_struct(&'static str, usize) -> Self::SerializeTupleStruct;
        serialize_tuple_variant(&'static str, u32, &'static str, usize) -> Self::SerializeTupleVariant;
        serialize_map(Option<usize>) -> Self::SerializeMap;
        serialize_struct(&'static str, usize) -> Self::SerializeStruct;
        serialize_struct_variant(&'static str, u32, &'static str, usize) -> Self::SerializeStructVariant;
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<N, Error> {
        value.serialize(self)
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<N, Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<N, Error> {
        other()
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

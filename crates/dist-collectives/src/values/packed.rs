//! Sequences of numbers of one type, which are stored as bytes.

use std::marker::PhantomData;
use std::slice::ChunksExact;

use bytemuck::Pod;
use serde::de::value::Error;
use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
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

/// The numbers of a packed sequence that have not been read yet.
struct Numbers<'a, N> {
    rest: ChunksExact<'a, u8>,
    number: PhantomData<N>,
}

impl<N: PackedNumber> Numbers<'_, N> {
    fn visit<'de, V: Visitor<'de>>(bytes: &[u8], visitor: V) -> Result<V::Value, Error> {
        let size = size_of::<N>();
        if !bytes.len().is_multiple_of(size) {
            return Err(Error::custom("a packed sequence ends within a number"));
        }
        let mut numbers = Numbers::<N> { rest: bytes.chunks_exact(size), number: PhantomData };
        let value = visitor.visit_seq(&mut numbers)?;
        match numbers.rest.len() {
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

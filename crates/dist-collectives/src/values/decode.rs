//! Decodes values that [`encode`](super::encode) has encoded.

use rmp::Marker;
use serde::de::value::Error;
use serde::de::{self, DeserializeOwned, DeserializeSeed, Error as _, Unexpected, Visitor};
use serde::{Deserializer, forward_to_deserialize_any};

use super::packed::NumberType;

/// Returns the value that these bytes encode.
///
/// # Errors
/// If the bytes are no value of this type, or if there are more bytes.
pub(super) fn decode<V: DeserializeOwned>(bytes: &[u8]) -> Result<V, Error> {
    let mut decoder = ValueDecoder { rest: bytes, depth: 0 };
    let value = V::deserialize(&mut decoder)?;
    match decoder.rest {
        [] => Ok(value),
        rest => Err(Error::custom(format_args!("{} bytes follow the value", rest.len()))),
    }
}

/// The number of levels up to which values can be nested, so that no input overflows the stack.
pub(super) const DEPTH_MAX: usize = 256;

/// Decodes the next value.
struct ValueDecoder<'de> {
    rest: &'de [u8],
    depth: usize,
}

impl<'de> ValueDecoder<'de> {
    fn take(&mut self, len: usize) -> Result<&'de [u8], Error> {
        let (taken, rest) =
            self.rest.split_at_checked(len).ok_or_else(|| Error::custom("the bytes end within a value"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
    }

    /// Returns the next length, of `N` bytes.
    fn length<const N: usize>(&mut self) -> Result<usize, Error> {
        let bytes: [u8; N] = self.array()?;
        Ok(bytes.into_iter().fold(0, |length, byte| length << 8 | usize::from(byte)))
    }

    fn peek(&self) -> Option<Marker> {
        self.rest.first().map(|&byte| Marker::from_u8(byte))
    }

    fn str<V: Visitor<'de>>(&mut self, len: usize, visitor: V) -> Result<V::Value, Error> {
        let bytes = self.take(len)?;
        let text = std::str::from_utf8(bytes)
            .map_err(|_| Error::invalid_value(Unexpected::Bytes(bytes), &visitor))?;
        visitor.visit_borrowed_str(text)
    }

    fn bytes<V: Visitor<'de>>(&mut self, len: usize, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_borrowed_bytes(self.take(len)?)
    }

    fn packed<V: Visitor<'de>>(&mut self, len: usize, visitor: V) -> Result<V::Value, Error> {
        let [code] = self.array()?;
        NumberType::visit_packed(code.cast_signed(), self.take(len)?, visitor)
    }

    fn sequence<V: Visitor<'de>>(&mut self, len: usize, visitor: V) -> Result<V::Value, Error> {
        self.nested(len, |elements| visitor.visit_seq(elements))
    }

    fn map<V: Visitor<'de>>(&mut self, len: usize, visitor: V) -> Result<V::Value, Error> {
        self.nested(len, |entries| visitor.visit_map(entries))
    }

    /// Reads this many elements or entries, all of them.
    fn nested<T>(
        &mut self,
        len: usize,
        visit: impl FnOnce(&mut UnreadElements<'_, 'de>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.depth == DEPTH_MAX {
            return Err(Error::custom(format_args!("values are nested in more than {DEPTH_MAX} levels")));
        }
        self.depth += 1;
        let mut elements = UnreadElements { decoder: self, left: len };
        let value = visit(&mut elements)?;
        if elements.left > 0 {
            return Err(Error::invalid_length(len, &"fewer elements"));
        }
        self.depth -= 1;
        Ok(value)
    }

    /// Returns the number whose 16 bytes come next, if they do.
    fn wide(&mut self) -> Result<Option<[u8; 16]>, Error> {
        let [marker, 16, ..] = *self.rest else { return Ok(None) };
        if Marker::from_u8(marker) != Marker::Bin8 {
            return Ok(None);
        }
        self.take(2)?;
        self.array().map(Some)
    }
}

impl<'de> Deserializer<'de> for &mut ValueDecoder<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let [marker] = self.array()?;
        match Marker::from_u8(marker) {
            Marker::Null => visitor.visit_unit(),
            Marker::False => visitor.visit_bool(false),
            Marker::True => visitor.visit_bool(true),
            Marker::FixPos(number) => visitor.visit_u8(number),
            Marker::FixNeg(number) => visitor.visit_i8(number),
            Marker::U8 => visitor.visit_u8(u8::from_be_bytes(self.array()?)),
            Marker::U16 => visitor.visit_u16(u16::from_be_bytes(self.array()?)),
            Marker::U32 => visitor.visit_u32(u32::from_be_bytes(self.array()?)),
            Marker::U64 => visitor.visit_u64(u64::from_be_bytes(self.array()?)),
            Marker::I8 => visitor.visit_i8(i8::from_be_bytes(self.array()?)),
            Marker::I16 => visitor.visit_i16(i16::from_be_bytes(self.array()?)),
            Marker::I32 => visitor.visit_i32(i32::from_be_bytes(self.array()?)),
            Marker::I64 => visitor.visit_i64(i64::from_be_bytes(self.array()?)),
            Marker::F32 => visitor.visit_f32(f32::from_be_bytes(self.array()?)),
            Marker::F64 => visitor.visit_f64(f64::from_be_bytes(self.array()?)),
            Marker::FixStr(len) => self.str(len.into(), visitor),
            Marker::Str8 => self.length::<1>().and_then(|len| self.str(len, visitor)),
            Marker::Str16 => self.length::<2>().and_then(|len| self.str(len, visitor)),
            Marker::Str32 => self.length::<4>().and_then(|len| self.str(len, visitor)),
            Marker::Bin8 => self.length::<1>().and_then(|len| self.bytes(len, visitor)),
            Marker::Bin16 => self.length::<2>().and_then(|len| self.bytes(len, visitor)),
            Marker::Bin32 => self.length::<4>().and_then(|len| self.bytes(len, visitor)),
            Marker::FixArray(len) => self.sequence(len.into(), visitor),
            Marker::Array16 => self.length::<2>().and_then(|len| self.sequence(len, visitor)),
            Marker::Array32 => self.length::<4>().and_then(|len| self.sequence(len, visitor)),
            Marker::FixMap(len) => self.map(len.into(), visitor),
            Marker::Map16 => self.length::<2>().and_then(|len| self.map(len, visitor)),
            Marker::Map32 => self.length::<4>().and_then(|len| self.map(len, visitor)),
            Marker::FixExt1 => self.packed(1, visitor),
            Marker::FixExt2 => self.packed(2, visitor),
            Marker::FixExt4 => self.packed(4, visitor),
            Marker::FixExt8 => self.packed(8, visitor),
            Marker::FixExt16 => self.packed(16, visitor),
            Marker::Ext8 => self.length::<1>().and_then(|len| self.packed(len, visitor)),
            Marker::Ext16 => self.length::<2>().and_then(|len| self.packed(len, visitor)),
            Marker::Ext32 => self.length::<4>().and_then(|len| self.packed(len, visitor)),
            Marker::Reserved => Err(Error::custom("byte 0xc1 begins no value")),
        }
    }

    fn deserialize_i128<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.wide()? {
            Some(bytes) => visitor.visit_i128(i128::from_be_bytes(bytes)),
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_u128<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.wide()? {
            Some(bytes) => visitor.visit_u128(u128::from_be_bytes(bytes)),
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.peek() == Some(Marker::Null) {
            self.take(1)?;
            return visitor.visit_none();
        }
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.peek() {
            Some(Marker::FixMap(1)) => {
                self.take(1)?;
                self.nested(0, |elements| {
                    visitor.visit_enum(Variant { decoder: &mut *elements.decoder, has_content: true })
                })
            }
            _ => visitor.visit_enum(Variant { decoder: self, has_content: false }),
        }
    }

    fn is_human_readable(&self) -> bool {
        false
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

/// The elements of a sequence, or the entries of a map, that have not been read yet.
struct UnreadElements<'a, 'de> {
    decoder: &'a mut ValueDecoder<'de>,
    left: usize,
}

impl<'de> UnreadElements<'_, 'de> {
    fn next<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        seed.deserialize(&mut *self.decoder).map(Some)
    }

    /// Returns the number that is left, but not more than the bytes can encode.
    fn hint(&self) -> Option<usize> {
        Some(self.left.min(self.decoder.rest.len()))
    }
}

impl<'de> de::SeqAccess<'de> for UnreadElements<'_, 'de> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        self.next(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.hint()
    }
}

impl<'de> de::MapAccess<'de> for UnreadElements<'_, 'de> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        self.next(seed)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(&mut *self.decoder)
    }

    fn size_hint(&self) -> Option<usize> {
        self.hint()
    }
}

/// A variant of an enum: its name, and its content if it has any.
struct Variant<'a, 'de> {
    decoder: &'a mut ValueDecoder<'de>,
    has_content: bool,
}

impl<'de> de::EnumAccess<'de> for Variant<'_, 'de> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), Error> {
        Ok((seed.deserialize(&mut *self.decoder)?, self))
    }
}

impl<'de> Variant<'_, 'de> {
    /// Returns the decoder of the content.
    fn content(&mut self, expected: &dyn de::Expected) -> Result<&mut ValueDecoder<'de>, Error> {
        if !self.has_content {
            return Err(Error::invalid_type(Unexpected::UnitVariant, expected));
        }
        Ok(self.decoder)
    }
}

impl<'de> de::VariantAccess<'de> for Variant<'_, 'de> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        if self.has_content {
            return Err(Error::invalid_type(Unexpected::NewtypeVariant, &"a variant without content"));
        }
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(mut self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self.content(&"a variant with a value")?)
    }

    fn tuple_variant<V: Visitor<'de>>(mut self, _: usize, visitor: V) -> Result<V::Value, Error> {
        self.content(&visitor)?.deserialize_any(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        mut self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.content(&visitor)?.deserialize_any(visitor)
    }
}

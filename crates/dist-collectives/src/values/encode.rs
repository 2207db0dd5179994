//! Encodes values as MessagePack, with the names of fields. A sequence of numbers of one type is an extension that
//! holds the numbers as they are in memory.

use rmp::Marker;
use rmp::encode;
use serde::de::value::Error;
use serde::ser::{self, Error as _, Serialize, Serializer};

use super::packed::{NumberType, PackedNumber, Plain};

/// Returns the encoded value, in this memory, which is empty.
///
/// # Errors
/// If an implementation of `Serialize` fails, or announces another number of elements than it writes.
pub(super) fn encode<V: Serialize + ?Sized>(value: &V, mut out: Vec<u8>) -> Result<Vec<u8>, Error> {
    value.serialize(ValueEncoder { out: &mut out, sequence: None })?;
    Ok(out)
}

/// The number of elements from which on a sequence of numbers is packed.
const PACKED_MIN: usize = 4;

/// Encodes one value.
struct ValueEncoder<'a> {
    out: &'a mut Vec<u8>,
    /// The form of the sequence that the value is an element of.
    sequence: Option<&'a mut Form>,
}

/// The form of a sequence, which its elements decide.
enum Form {
    /// No element was written.
    Undecided { len: usize },
    /// All elements so far are numbers of this type. The sequence starts at `start`, and the numbers at `body`.
    Packed { number: NumberType, start: usize, body: usize, len: usize },
    /// Elements are values of any type.
    Plain,
}

impl Form {
    /// Makes sure that any value can be the next element.
    #[cold]
    fn make_plain(&mut self, out: &mut Vec<u8>) -> Result<(), Error> {
        match std::mem::replace(self, Self::Plain) {
            Self::Plain => Ok(()),
            Self::Undecided { len } => write_array_len(out, len),
            Self::Packed { number, start, body, len } => {
                let numbers = out.split_off(body);
                out.truncate(start);
                write_array_len(out, len)?;
                number.for_each(&numbers, |number| write_number(out, number));
                Ok(())
            }
        }
    }

    /// Starts a packed sequence.
    fn pack<N: PackedNumber>(out: &mut Vec<u8>, len: usize) -> Result<Self, Error> {
        let (start, size) = (out.len(), len.checked_mul(size_of::<N>()));
        let size = size.and_then(|size| u32::try_from(size).ok()).ok_or_else(too_long)?;
        write(encode::write_ext_meta(out, size, N::TYPE.code()));
        out.reserve(size as usize);
        Ok(Self::Packed { number: N::TYPE, start, body: out.len(), len })
    }
}

impl<'a> ValueEncoder<'a> {
    /// Writes a number. In a sequence that is packed, only its bytes.
    #[inline]
    fn number<N: PackedNumber + Into<Plain>>(self, number: N) -> Result<(), Error> {
        if let Some(form) = self.sequence {
            match form {
                Form::Packed { number: of_all, .. } if *of_all == N::TYPE => {}
                Form::Undecided { len } => *form = Form::pack::<N>(self.out, *len)?,
                _ => {
                    form.make_plain(self.out)?;
                    write_number(self.out, number.into());
                    return Ok(());
                }
            }
            self.out.extend_from_slice(bytemuck::bytes_of(&number));
            return Ok(());
        }
        write_number(self.out, number.into());
        Ok(())
    }

    /// Returns the memory for a value that is no number.
    fn plain(self) -> Result<&'a mut Vec<u8>, Error> {
        if let Some(form) = self.sequence {
            form.make_plain(self.out)?;
        }
        Ok(self.out)
    }

    fn str(self, text: &str) -> Result<(), Error> {
        write_str(self.plain()?, text)
    }

    fn bytes(self, bytes: &[u8]) -> Result<(), Error> {
        let out = self.plain()?;
        length(bytes.len())?;
        write(encode::write_bin(out, bytes));
        Ok(())
    }

    fn sequence(self, len: usize) -> Result<SequenceEncoder<'a>, Error> {
        let out = self.plain()?;
        let form = if len < PACKED_MIN {
            write_array_len(out, len)?;
            Form::Plain
        } else {
            Form::Undecided { len }
        };
        Ok(SequenceEncoder { out, form, count: Count { announced: Some(len), written: 0, start: 0 } })
    }

    fn map(self, len: usize) -> Result<MapEncoder<'a>, Error> {
        let out = self.plain()?;
        write(encode::write_map_len(out, length(len)?));
        Ok(MapEncoder { out, count: Count { announced: Some(len), written: 0, start: 0 } })
    }

    /// Writes the name of a variant, before its content.
    fn variant(self, name: &str) -> Result<Self, Error> {
        let out = self.plain()?;
        write(encode::write_map_len(out, 1));
        write_str(out, name)?;
        Ok(Self { out, sequence: None })
    }
}

/// The number of elements of a sequence or map.
struct Count {
    announced: Option<usize>,
    written: usize,
    /// The position of the length, if it is not known in advance.
    start: usize,
}

impl Count {
    /// Begins a sequence or map of unknown length.
    fn unknown(out: &mut Vec<u8>, marker: Marker) -> Self {
        out.push(marker.to_u8());
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        Self { announced: None, written: 0, start }
    }

    /// Checks the length, or writes it.
    fn end(&self, out: &mut [u8]) -> Result<(), Error> {
        match self.announced {
            Some(announced) if announced != self.written => Err(Error::custom(format_args!(
                "{announced} elements were announced and {} written",
                self.written
            ))),
            Some(_) => Ok(()),
            None => {
                let written = length(self.written)?;
                out[self.start..self.start + 4].copy_from_slice(&written.to_be_bytes());
                Ok(())
            }
        }
    }
}

/// Encodes the elements of a sequence, tuple or tuple struct.
struct SequenceEncoder<'a> {
    out: &'a mut Vec<u8>,
    form: Form,
    count: Count,
}

impl SequenceEncoder<'_> {
    #[inline]
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.count.written += 1;
        value.serialize(ValueEncoder { out: self.out, sequence: Some(&mut self.form) })
    }

    fn end(mut self) -> Result<(), Error> {
        if let Form::Undecided { .. } = self.form {
            self.form.make_plain(self.out)?;
        }
        self.count.end(self.out)
    }
}

/// Encodes the entries of a map or struct.
struct MapEncoder<'a> {
    out: &'a mut Vec<u8>,
    count: Count,
}

impl MapEncoder<'_> {
    fn value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        value.serialize(ValueEncoder { out: self.out, sequence: None })
    }

    fn key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        self.count.written += 1;
        self.value(key)
    }
}

macro_rules! numbers {
    ($($function:ident: $number:ty;)*) => {$(
        #[inline]
        fn $function(self, number: $number) -> Result<(), Error> {
            self.number(number)
        }
    )*};
}

impl<'a> Serializer for ValueEncoder<'a> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = SequenceEncoder<'a>;
    type SerializeTuple = SequenceEncoder<'a>;
    type SerializeTupleStruct = SequenceEncoder<'a>;
    type SerializeTupleVariant = SequenceEncoder<'a>;
    type SerializeMap = MapEncoder<'a>;
    type SerializeStruct = MapEncoder<'a>;
    type SerializeStructVariant = MapEncoder<'a>;

    numbers! {
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

    fn serialize_i128(self, number: i128) -> Result<(), Error> {
        self.bytes(&number.to_be_bytes())
    }

    fn serialize_u128(self, number: u128) -> Result<(), Error> {
        self.bytes(&number.to_be_bytes())
    }

    fn serialize_bool(self, value: bool) -> Result<(), Error> {
        self.plain()?.push(if value { Marker::True } else { Marker::False }.to_u8());
        Ok(())
    }

    fn serialize_char(self, value: char) -> Result<(), Error> {
        self.str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, text: &str) -> Result<(), Error> {
        self.str(text)
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<(), Error> {
        self.bytes(bytes)
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Error> {
        self.plain()?.push(Marker::Null.to_u8());
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Error> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Error> {
        self.str(variant)
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        value.serialize(self.variant(variant)?)
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<SequenceEncoder<'a>, Error> {
        let Some(len) = len else {
            let out = self.plain()?;
            let count = Count::unknown(out, Marker::Array32);
            return Ok(SequenceEncoder { out, form: Form::Plain, count });
        };
        self.sequence(len)
    }

    fn collect_seq<I: IntoIterator<Item: Serialize>>(self, elements: I) -> Result<(), Error> {
        let mut elements = elements.into_iter();
        let len = Some(elements.size_hint()).filter(|&(least, most)| most == Some(least));
        let mut sequence = self.serialize_seq(len.map(|(len, _)| len))?;
        while let Some(element) = elements.next() {
            sequence.element(&element)?;
            if let Form::Packed { number, .. } = sequence.form {
                let (written, other) = number.write_all(&mut elements, sequence.out);
                sequence.count.written += written;
                other.map_or(Ok(()), |other| sequence.element(&other))?;
            }
        }
        sequence.end()
    }

    fn serialize_tuple(self, len: usize) -> Result<SequenceEncoder<'a>, Error> {
        self.sequence(len)
    }

    fn serialize_tuple_struct(self, _: &'static str, len: usize) -> Result<SequenceEncoder<'a>, Error> {
        self.sequence(len)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<SequenceEncoder<'a>, Error> {
        self.variant(variant)?.sequence(len)
    }

    fn serialize_map(self, len: Option<usize>) -> Result<MapEncoder<'a>, Error> {
        let Some(len) = len else {
            let out = self.plain()?;
            let count = Count::unknown(out, Marker::Map32);
            return Ok(MapEncoder { out, count });
        };
        self.map(len)
    }

    fn serialize_struct(self, _: &'static str, len: usize) -> Result<MapEncoder<'a>, Error> {
        self.map(len)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<MapEncoder<'a>, Error> {
        self.variant(variant)?.map(len)
    }

    fn is_human_readable(&self) -> bool {
        false
    }
}

macro_rules! sequences {
    ($($kind:ident: $function:ident;)*) => {$(
        impl ser::$kind for SequenceEncoder<'_> {
            type Ok = ();
            type Error = Error;

            #[inline]
            fn $function<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
                self.element(value)
            }

            fn end(self) -> Result<(), Error> {
                self.end()
            }
        }
    )*};
}

sequences! {
    SerializeSeq: serialize_element;
    SerializeTuple: serialize_element;
    SerializeTupleStruct: serialize_field;
    SerializeTupleVariant: serialize_field;
}

macro_rules! structs {
    ($($kind:ident)*) => {$(
        impl ser::$kind for MapEncoder<'_> {
            type Ok = ();
            type Error = Error;

            fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<(), Error> {
                self.key(key)?;
                self.value(value)
            }

            fn end(self) -> Result<(), Error> {
                self.count.end(self.out)
            }
        }
    )*};
}

structs! { SerializeStruct SerializeStructVariant }

impl ser::SerializeMap for MapEncoder<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Error> {
        self.key(key)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.value(value)
    }

    fn end(self) -> Result<(), Error> {
        self.count.end(self.out)
    }
}

fn write_number(out: &mut Vec<u8>, number: Plain) {
    match number {
        Plain::Signed(number) => drop(write(encode::write_sint(out, number))),
        Plain::Unsigned(number) => drop(write(encode::write_uint(out, number))),
        Plain::Single(number) => write(encode::write_f32(out, number)),
        Plain::Double(number) => write(encode::write_f64(out, number)),
    }
}

fn write_array_len(out: &mut Vec<u8>, len: usize) -> Result<(), Error> {
    write(encode::write_array_len(out, length(len)?));
    Ok(())
}

fn write_str(out: &mut Vec<u8>, text: &str) -> Result<(), Error> {
    length(text.len())?;
    write(encode::write_str(out, text));
    Ok(())
}

/// Returns the result of writing into memory, which does not fail.
fn write<T, E: std::fmt::Debug>(written: Result<T, E>) -> T {
    written.expect("a vector takes all bytes")
}

fn length(len: usize) -> Result<u32, Error> {
    u32::try_from(len).map_err(|_| too_long())
}

fn too_long() -> Error {
    Error::custom("a sequence is longer than MessagePack allows")
}

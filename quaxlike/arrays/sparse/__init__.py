"""Arrays that are mostly zero, stored by what is not."""

from .one_hot import OneHotVector as OneHotVector

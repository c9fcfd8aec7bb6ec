/* The part of the plan cache (runtime/plan_cache.py) that runs in every call.

   describe(*tensors)                 the signature of tensors, as bytes; None: such a call cannot be cached
   finder(plans, ...)                 find(options, *tensors): `PlanCache.find`
   launch(kernel, rows, *arguments)   calls a compiled kernel's function as tvm_ffi does

   Tensors are read through torch's own table of C functions for DLPack, and kernels are called through
   tvm_ffi's C interface: nothing here knows how either lays its objects out.  Compiled on the machine
   where it runs (compile/extension.py), for its Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlpack/dlpack.h>
#include <stdint.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#ifdef Py_GIL_DISABLED
#error "a tensor's sizes are read without a lock, which the GIL stands for"
#endif

enum { MOST_ARGUMENTS = 24, MOST_DIMENSIONS = 16, ALIGNMENT = 16, NUMBER_BYTES = 512 };
/* GPU memory lies above; below, the storage is asked whether it was freed. */
#define LEAST_ADDRESS ((uintptr_t)1 << 32)

static const DLPackExchangeAPI *torch_table;
static PyTypeObject *tensor_type, *parameter_type;

/* Names of attributes. */
static struct {
  PyObject *is_neg, *chandle, *untyped_storage, *data_ptr;
} name;

/* 0, or -1 with an exception. */
static int read_tensor(PyObject *tensor, DLTensor *into) {
  return torch_table->dltensor_from_py_object_no_sync(tensor, into);
}

/* ---- describe ---- */

/* Whether the storage of a tensor has memory; 0 with an exception where torch raises. */
static int has_storage(PyObject *tensor) {
  PyObject *storage = PyObject_CallMethodNoArgs(tensor, name.untyped_storage);
  PyObject *address = storage ? PyObject_CallMethodNoArgs(storage, name.data_ptr) : NULL;
  int truth = address ? PyObject_IsTrue(address) : 0;
  Py_XDECREF(storage);
  Py_XDECREF(address);
  return truth > 0;
}

/* One tensor's words, behind `at`; NULL where a call with it cannot be cached.  An exception may be set. */
static int64_t *describe_one(PyObject *tensor, int64_t *at, const int64_t *end) {
  DLTensor t;
  if (at == end) return NULL;
  if (tensor == Py_None) {
    *at++ = -1;
    return at;
  }
  /* A subclass has a say in every call. */
  if (Py_TYPE(tensor) != tensor_type && Py_TYPE(tensor) != parameter_type) return NULL;
  if (read_tensor(tensor, &t)) {
    PyErr_Clear(); /* sparse, nested and functional tensors have no such memory */
    return NULL;
  }
  /* No memory: empty, a ZeroTensor, freed for a while (a view of that is at its offset from 0). */
  uintptr_t address = (uintptr_t)t.data + t.byte_offset;
  if (t.data == NULL || address % ALIGNMENT || t.ndim > MOST_DIMENSIONS) return NULL;
  if (address < LEAST_ADDRESS && !has_storage(tensor)) return NULL;
  /* Negation that has not been done yet is not in the memory's description. */
  PyObject *negative = PyObject_CallMethodNoArgs(tensor, name.is_neg);
  if (negative == NULL) return NULL;
  Py_DECREF(negative);
  if (negative != Py_False || end - at < 3 + 2 * t.ndim) return NULL;
  *at++ = t.ndim;
  *at++ = t.dtype.code | (int64_t)t.dtype.bits << 8 | (int64_t)t.dtype.lanes << 16;
  *at++ = (int64_t)t.device.device_type << 32 | (uint32_t)t.device.device_id;
  for (int i = 0; i < t.ndim; i++) *at++ = t.shape[i];
  for (int i = 0; i < t.ndim; i++) *at++ = t.strides[i];
  return at;
}

static PyObject *describe(PyObject *self, PyObject *const *tensors, Py_ssize_t count) {
  int64_t words[MOST_ARGUMENTS * 8];
  int64_t *at = words;
  for (Py_ssize_t i = 0; i < count; i++) {
    at = describe_one(tensors[i], at, words + sizeof words / sizeof *words);
    if (at == NULL) {
      if (PyErr_Occurred()) return NULL;
      Py_RETURN_NONE;
    }
  }
  return PyBytes_FromStringAndSize((const char *)words, (char *)at - (char *)words);
}

/* ---- find ---- */

/* Whether an answer, which is given away, is true: 1, 0, or -1 with an exception. */
static int is_true(PyObject *answer) {
  if (answer == NULL) return -1;
  int truth = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth;
}

/* Whether one of the interceptors answers with a true value; likewise. */
static int is_intercepted(PyObject *interceptors) {
  int answer = 0;
  for (Py_ssize_t i = 0; !answer && i < PyTuple_GET_SIZE(interceptors); i++)
    answer = is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(interceptors, i)));
  return answer;
}

/* plan_cache.py's `number_bits`, appended behind `at`; NULL where there is no capacity left. */
static char *write_numbers(PyObject *options, char *at, const char *end) {
  if (PyTuple_CheckExact(options)) {
    for (Py_ssize_t i = 0; at != NULL && i < PyTuple_GET_SIZE(options); i++)
      at = write_numbers(PyTuple_GET_ITEM(options, i), at, end);
  } else if (PyFloat_Check(options)) {
    double value = PyFloat_AS_DOUBLE(options);
    if (end - at < 1 + (int)sizeof value) return NULL;
    *at++ = 'f';
    memcpy(at, &value, sizeof value);
    at += sizeof value;
  } else if (PyLong_Check(options)) {
    if (at == end) return NULL;
    *at++ = PyBool_Check(options) ? 'b' : 'i';
  }
  return at;
}

/* plan_cache.py's `_key` but for `is_cacheable`; None where the call cannot be cached. */
static PyObject *key_of(PyObject *settings, PyObject *const *given, Py_ssize_t count) {
  if (Py_TYPE(given[1]) != tensor_type && Py_TYPE(given[1]) != parameter_type) Py_RETURN_NONE;
  char numbers[NUMBER_BYTES], *end = write_numbers(given[0], numbers, numbers + NUMBER_BYTES);
  if (end == NULL) Py_RETURN_NONE;
  PyObject *described = describe(NULL, given + 1, count - 1);
  if (described == NULL || described == Py_None) return described;
  PyObject *bits = PyBytes_FromStringAndSize(numbers, end - numbers);
  PyObject *values = bits ? PyObject_CallNoArgs(settings) : NULL;
  PyObject *key = values ? PyTuple_Pack(4, given[0], bits, values, described) : NULL;
  Py_DECREF(described);
  Py_XDECREF(bits);
  Py_XDECREF(values);
  return key;
}

/* self: (plans, interceptors, settings, is_cacheable); given: options, and the call's tensors. */
static PyObject *find(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "find takes options and tensors");
    return NULL;
  }
  int intercepted = is_intercepted(PyTuple_GET_ITEM(self, 1));
  if (intercepted < 0) return NULL;
  if (intercepted) Py_RETURN_FALSE;
  PyObject *key = key_of(PyTuple_GET_ITEM(self, 2), given, count);
  if (key == NULL) return NULL;
  int cacheable = key == Py_None ? 0 : is_true(PyObject_Vectorcall(PyTuple_GET_ITEM(self, 3), given + 1, count - 1, NULL));
  PyObject *plan = cacheable > 0 ? PyDict_GetItemWithError(PyTuple_GET_ITEM(self, 0), key) : NULL;
  Py_XINCREF(plan);
  Py_DECREF(key);
  if (plan != NULL) return plan;
  if (PyErr_Occurred()) { /* unhashable options are refused by checks */
    if (cacheable < 0 || !PyErr_ExceptionMatches(PyExc_TypeError)) return NULL;
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
  if (cacheable) Py_RETURN_NONE;
  Py_RETURN_FALSE;
}

static PyMethodDef find_method = {"find", (PyCFunction)(void (*)(void))find, METH_FASTCALL, NULL};

/* plans: a dict by key; interceptors: functions; settings(); is_cacheable(*tensors). */
static PyObject *finder(PyObject *self, PyObject *parts) {
  PyObject *plans, *interceptors, *settings, *cacheable;
  if (!PyArg_ParseTuple(parts, "O!O!OO", &PyDict_Type, &plans, &PyTuple_Type, &interceptors, &settings, &cacheable))
    return NULL;
  return PyCFunction_New(&find_method, parts);
}

/* ---- launch ---- */

/* What tvm_ffi says of a call that failed, as an exception. */
static void raise_failure(void) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == NULL) {
    PyErr_SetString(PyExc_RuntimeError, "a kernel's function failed and does not say why");
    return;
  }
  const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
  PyObject *kind = PyUnicode_DecodeUTF8(cell->kind.data, cell->kind.size, "replace");
  PyObject *message = PyUnicode_DecodeUTF8(cell->message.data, cell->message.size, "replace");
  if (kind && message) PyErr_Format(PyExc_RuntimeError, "%U: %U", kind, message);
  Py_XDECREF(kind);
  Py_XDECREF(message);
  TVMFFIObjectDecRef(error);
}

/* [..., D] of contiguous memory as [rows, D]; `sizes` are four words that live as long as `t`. */
static void flatten(DLTensor *t, int64_t *sizes) {
  int64_t width = t->ndim ? t->shape[t->ndim - 1] : 1, rows = 1;
  for (int i = 0; i + 1 < t->ndim; i++) rows *= t->shape[i];
  sizes[0] = rows, sizes[1] = width, sizes[2] = width ? width : 1, sizes[3] = 1;
  t->ndim = 2, t->shape = sizes, t->strides = sizes + 2;
}

/* 0, or -1 with an exception. */
static int pack(PyObject *value, TVMFFIAny *into, DLTensor *tensor) {
  memset(into, 0, sizeof *into);
  if (value == Py_None) {
    into->type_index = kTVMFFINone;
  } else if (PyFloat_CheckExact(value)) {
    into->type_index = kTVMFFIFloat;
    into->v_float64 = PyFloat_AS_DOUBLE(value);
  } else if (PyLong_CheckExact(value)) {
    into->type_index = kTVMFFIInt;
    into->v_int64 = PyLong_AsLongLong(value);
    if (into->v_int64 == -1 && PyErr_Occurred()) return -1;
  } else if (PyObject_TypeCheck(value, tensor_type)) {
    if (read_tensor(value, tensor)) return -1;
    into->type_index = kTVMFFIDLTensorPtr;
    into->v_ptr = tensor;
  } else {
    PyErr_Format(PyExc_TypeError, "a kernel takes no %.100s", Py_TYPE(value)->tp_name);
    return -1;
  }
  return 0;
}

/* kernel: a tvm_ffi.Function; rows: bit i is set where argument i is taken as [rows, D]. */
static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  TVMFFIAny arguments[MOST_ARGUMENTS], result;
  DLTensor tensors[MOST_ARGUMENTS];
  int64_t sizes[MOST_ARGUMENTS][4];
  const DLTensor *first = NULL;
  void *stream = NULL, *before = NULL;
  if (count < 2 || count - 2 > MOST_ARGUMENTS) {
    PyErr_Format(PyExc_TypeError, "launch takes a function, rows and at most %d arguments", MOST_ARGUMENTS);
    return NULL;
  }
  PyObject *address = PyObject_CallMethodNoArgs(given[0], name.chandle);
  if (address == NULL) return NULL;
  void *handle = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  unsigned long rows = PyLong_AsUnsignedLong(given[1]);
  if (PyErr_Occurred()) return NULL;
  int n = (int)(count - 2);
  for (int i = 0; i < n; i++) {
    if (pack(given[i + 2], &arguments[i], &tensors[i])) return NULL;
    if (arguments[i].type_index != kTVMFFIDLTensorPtr) continue;
    if (rows >> i & 1) flatten(&tensors[i], sizes[i]);
    if (first == NULL && tensors[i].device.device_type != kDLCPU) first = &tensors[i];
  }
  if (first != NULL) {
    DLDevice device = first->device;
    if (torch_table->current_work_stream(device.device_type, device.device_id, &stream)) return NULL;
    if (TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &before)) {
      raise_failure();
      return NULL;
    }
  }
  int failed;
  memset(&result, 0, sizeof result);
  Py_BEGIN_ALLOW_THREADS; /* a launch waits while the queue is full */
  failed = TVMFFIFunctionCall(handle, arguments, n, &result);
  Py_END_ALLOW_THREADS;
  if (failed) raise_failure();
  if (first != NULL && before != stream &&
      TVMFFIEnvSetStream(first->device.device_type, first->device.device_id, before, NULL) && !failed) {
    raise_failure();
    failed = 1;
  }
  if (failed) return NULL;
  Py_RETURN_NONE;
}

/* ---- the module ---- */

static PyMethodDef methods[] = {
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, NULL},
    {"finder", finder, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "calls", NULL, -1, methods, NULL, NULL, NULL, NULL};

/* torch's types and its table; 0, or -1 with an exception. */
static int bind_torch(void) {
  PyObject *torch = PyImport_ImportModule("torch"), *nn = PyImport_ImportModule("torch.nn");
  PyObject *tensor = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
  PyObject *parameter = nn ? PyObject_GetAttrString(nn, "Parameter") : NULL;
  PyObject *capsule = tensor ? PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__") : NULL;
  Py_XDECREF(torch);
  Py_XDECREF(nn);
  if (tensor != NULL && capsule == NULL) PyErr_SetString(PyExc_ImportError, "torch has no table of DLPack functions");
  if (capsule == NULL || parameter == NULL) return -1;
  torch_table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"); /* as long as the process */
  if (torch_table == NULL) return -1;
  if (torch_table->header.version.major != DLPACK_MAJOR_VERSION ||
      torch_table->dltensor_from_py_object_no_sync == NULL || torch_table->current_work_stream == NULL) {
    PyErr_SetString(PyExc_ImportError, "torch's table of DLPack functions is of another version");
    return -1;
  }
  tensor_type = (PyTypeObject *)tensor;
  parameter_type = (PyTypeObject *)parameter;
  return 0;
}

/* What this file asks for by name; 0, or -1 with an exception. */
static int bind_names(void) {
  const struct {
    PyObject **into;
    const char *text;
  } names[] = {
      {&name.is_neg, "is_neg"},
      {&name.untyped_storage, "untyped_storage"},
      {&name.data_ptr, "data_ptr"},
      {&name.chandle, "__chandle__"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if ((*names[i].into = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
  return 0;
}

PyMODINIT_FUNC PyInit_calls(void) {
  return bind_names() || bind_torch() ? NULL : PyModule_Create(&module);
}

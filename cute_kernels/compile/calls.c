/* The part of the plan cache (runtime/plan_cache.py) that runs in every call.

   describe(*tensors)                 the signature of tensors, as bytes; None: such a call cannot be cached
   finder(plans, ...)                 find(options, *tensors): `PlanCache.find`
   caller(plans, ..., op)             call(*args): finds the plan of an op's call and runs it
   launch(kernel, rows, *arguments)   calls a compiled kernel's function as tvm_ffi does
   program(count, ...)                run(*args): allocates outputs, launches kernels, returns outputs

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
  PyObject *is_neg, *chandle, *untyped_storage, *data_ptr, *get, *on_gpu, *mapping, *data;
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
  /* Subclasses can intercept calls: not cacheable. */
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

/* Whether an interceptor need not be asked: 1, 0, or -1 with an exception.

   quick: a function that answers with a false value where nothing intercepts, or (dict, name, idle): nothing does
   where dict[name] is idle. */
static int is_idle(PyObject *quick) {
  if (!PyTuple_CheckExact(quick)) {
    int truth = is_true(PyObject_CallNoArgs(quick));
    return truth < 0 ? -1 : !truth;
  }
  PyObject *value = PyDict_GetItemWithError(PyTuple_GET_ITEM(quick, 0), PyTuple_GET_ITEM(quick, 1));
  if (value == NULL && PyErr_Occurred()) return -1;
  return value == PyTuple_GET_ITEM(quick, 2);
}

/* Whether one of the interceptors answers with a true value: 1, 0, or -1 with an exception.  Each is a function,
   or (quick, function), as in `is_idle`. */
static int is_intercepted(PyObject *interceptors) {
  int answer = 0;
  for (Py_ssize_t i = 0; !answer && i < PyTuple_GET_SIZE(interceptors); i++) {
    PyObject *ask = PyTuple_GET_ITEM(interceptors, i);
    if (PyTuple_CheckExact(ask)) {
      int idle = is_idle(PyTuple_GET_ITEM(ask, 0));
      if (idle < 0) return -1;
      if (idle) continue;
      ask = PyTuple_GET_ITEM(ask, 1);
    }
    answer = is_true(PyObject_CallNoArgs(ask));
  }
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

/* settings.py's `plan_settings()`, a new reference.

   settings: (function, values, get, known): the function need not be called where values["get"] is `get` and
   values[known] is not None. */
static PyObject *settings_of(PyObject *settings) {
  PyObject *values = PyTuple_GET_ITEM(settings, 1);
  if (PyDict_GetItemWithError(values, name.get) == PyTuple_GET_ITEM(settings, 2)) {
    PyObject *known = PyDict_GetItemWithError(values, PyTuple_GET_ITEM(settings, 3));
    if (known != NULL && known != Py_None) return Py_NewRef(known);
  }
  return PyErr_Occurred() ? NULL : PyObject_CallNoArgs(PyTuple_GET_ITEM(settings, 0));
}

/* plan_cache.py's `_key` but for `is_cacheable`; None where the call cannot be cached. */
static PyObject *key_of(PyObject *settings, PyObject *options, PyObject *const *tensors, Py_ssize_t count) {
  if (Py_TYPE(tensors[0]) != tensor_type && Py_TYPE(tensors[0]) != parameter_type) Py_RETURN_NONE;
  char numbers[NUMBER_BYTES], *end = write_numbers(options, numbers, numbers + NUMBER_BYTES);
  if (end == NULL) Py_RETURN_NONE;
  PyObject *described = describe(NULL, tensors, count);
  if (described == NULL || described == Py_None) return described;
  PyObject *bits = PyBytes_FromStringAndSize(numbers, end - numbers);
  PyObject *values = bits ? settings_of(settings) : NULL;
  PyObject *key = values ? PyTuple_Pack(4, options, bits, values, described) : NULL;
  Py_DECREF(described);
  Py_XDECREF(bits);
  Py_XDECREF(values);
  return key;
}

/* Whether fully_shard has made something of a module of this process, or may have: 1, 0, or -1 with an exception. */
static int may_shard(PyObject *modules, PyObject *states_name) {
  PyObject *states = PyDict_GetItemWithError(modules, states_name);
  if (states == NULL) return PyErr_Occurred() ? -1 : 0;
  PyObject *mapping = PyObject_GetAttr(states, name.mapping);
  PyObject *data = mapping ? PyObject_GetAttr(mapping, name.data) : NULL;
  int some = data == NULL || !PyDict_CheckExact(data) || PyDict_GET_SIZE(data) > 0;
  PyErr_Clear(); /* another version of torch: Python is asked */
  Py_XDECREF(mapping);
  Py_XDECREF(data);
  return some;
}

/* plan_cache.py's `is_cacheable(*tensors)`: 1, 0, or -1 with an exception.

   cacheable: (function, names, on_gpu, modules, states): the function need not be called where names["on_gpu"] is
   `on_gpu` and modules[states], if there is one, has no module. */
static int is_cacheable(PyObject *cacheable, PyObject *const *tensors, Py_ssize_t count) {
  if (PyDict_GetItemWithError(PyTuple_GET_ITEM(cacheable, 1), name.on_gpu) == PyTuple_GET_ITEM(cacheable, 2)) {
    int sharding = may_shard(PyTuple_GET_ITEM(cacheable, 3), PyTuple_GET_ITEM(cacheable, 4));
    if (sharding < 0) return -1;
    DLTensor first;
    if (!sharding && !read_tensor(tensors[0], &first))
      return first.device.device_type == kDLCUDA || first.device.device_type == kDLROCM;
    PyErr_Clear();
  } else if (PyErr_Occurred()) {
    return -1;
  }
  return is_true(PyObject_Vectorcall(PyTuple_GET_ITEM(cacheable, 0), tensors, count, NULL));
}

/* The entry in `parts` of a call, a new reference: a plan; None: no entry yet; False: it cannot be cached.

   parts: (plans, interceptors, settings, cacheable, ...). */
static PyObject *entry_of(PyObject *parts, PyObject *options, PyObject *const *tensors, Py_ssize_t count) {
  int intercepted = is_intercepted(PyTuple_GET_ITEM(parts, 1));
  if (intercepted < 0) return NULL;
  if (intercepted) Py_RETURN_FALSE;
  PyObject *key = key_of(PyTuple_GET_ITEM(parts, 2), options, tensors, count);
  if (key == NULL) return NULL;
  int cacheable = key == Py_None ? 0 : is_cacheable(PyTuple_GET_ITEM(parts, 3), tensors, count);
  PyObject *plan = cacheable > 0 ? PyDict_GetItemWithError(PyTuple_GET_ITEM(parts, 0), key) : NULL;
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

/* given: options, and the call's tensors. */
static PyObject *find(PyObject *parts, PyObject *const *given, Py_ssize_t count) {
  if (count < 2) {
    PyErr_SetString(PyExc_TypeError, "find takes options and tensors");
    return NULL;
  }
  return entry_of(parts, given[0], given + 1, count - 1);
}

static PyMethodDef find_method = {"find", (PyCFunction)(void (*)(void))find, METH_FASTCALL, NULL};

/* The checked parts of a finder or a caller, `size` of them: a borrowed reference, or NULL with an exception. */
static PyObject *checked_parts(PyObject *parts, Py_ssize_t size) {
  static const Py_ssize_t sizes[] = {0, 0, 4, 5};
  int right = PyTuple_GET_SIZE(parts) == size && PyDict_Check(PyTuple_GET_ITEM(parts, 0));
  for (int i = 1; right && i < 4; i++) {
    PyObject *part = PyTuple_GET_ITEM(parts, i);
    right = PyTuple_Check(part) && (!sizes[i] || PyTuple_GET_SIZE(part) == sizes[i]);
  }
  right = right && PyDict_Check(PyTuple_GET_ITEM(PyTuple_GET_ITEM(parts, 2), 1)) &&
          PyDict_Check(PyTuple_GET_ITEM(PyTuple_GET_ITEM(parts, 3), 1)) &&
          PyDict_Check(PyTuple_GET_ITEM(PyTuple_GET_ITEM(parts, 3), 3));
  if (right) return parts;
  PyErr_SetString(PyExc_TypeError, "expected plans, interceptors, settings and what is cacheable");
  return NULL;
}

/* plans: a dict by key; interceptors, settings and cacheable: as in `is_intercepted`, `settings_of`, `is_cacheable`. */
static PyObject *finder(PyObject *self, PyObject *parts) {
  if (checked_parts(parts, 4) == NULL) return NULL;
  return PyCFunction_New(&find_method, parts);
}

/* ---- call ---- */

/* A list as a tuple, with the addresses of tensors in it; NULL with an exception. */
static PyObject *constants_of(PyObject *list) {
  PyObject *constants = PyList_AsTuple(list);
  for (Py_ssize_t i = 0; constants != NULL && i < PyTuple_GET_SIZE(constants); i++) {
    PyObject *value = PyTuple_GET_ITEM(constants, i);
    if (!PyObject_TypeCheck(value, tensor_type)) continue;
    PyObject *address = PyLong_FromVoidPtr(value);
    if (address == NULL) Py_CLEAR(constants);
    else {
      PyTuple_SET_ITEM(constants, i, address);
      Py_DECREF(value);
    }
  }
  return constants;
}

/* The arguments at these positions as a tuple, lists as tuples; NULL with an exception. */
static PyObject *options_of(PyObject *positions, PyObject *const *given) {
  PyObject *options = PyTuple_New(PyTuple_GET_SIZE(positions));
  for (Py_ssize_t i = 0; options != NULL && i < PyTuple_GET_SIZE(positions); i++) {
    PyObject *value = given[PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i))];
    value = PyList_CheckExact(value) ? constants_of(value) : Py_NewRef(value);
    if (value == NULL) {
      Py_DECREF(options);
      return NULL;
    }
    PyTuple_SET_ITEM(options, i, value);
  }
  return options;
}

/* Whether autograd is on and an argument requires a gradient: 1, 0, or -1 with an exception. */
static int wants_gradient(PyObject *autograd, PyObject *const *given, Py_ssize_t count) {
  int wanted = is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(autograd, 0)));
  if (wanted > 0) wanted = is_true(PyObject_Vectorcall(PyTuple_GET_ITEM(autograd, 1), given, count, NULL));
  if (wanted <= 0) return wanted;
  int excluded = is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(autograd, 2)));
  return excluded < 0 ? -1 : !excluded;
}

/* Calls an op's node: apply(*given, plan). */
static PyObject *call_node(PyObject *apply, PyObject *const *given, Py_ssize_t count, PyObject *plan) {
  PyObject *arguments[MOST_ARGUMENTS + 1];
  memcpy(arguments, given, count * sizeof *given);
  arguments[count] = plan;
  return PyObject_Vectorcall(apply, arguments, count + 1, NULL);
}

/* parts: of a finder, then count, options, tensors, autograd, apply, miss: the number of arguments, positions of
   options and of tensors, (is_grad_enabled, any_requires_grad, is_excluded), the op's node or None, and what takes
   other calls. */
static PyObject *call(PyObject *parts, PyObject *const *given, Py_ssize_t count, PyObject *keywords) {
  PyObject *miss = PyTuple_GET_ITEM(parts, 9), *tensors[MOST_ARGUMENTS];
  if (keywords != NULL || count != PyLong_AsSsize_t(PyTuple_GET_ITEM(parts, 4)))
    return PyObject_Vectorcall(miss, given, count, keywords);
  PyObject *positions = PyTuple_GET_ITEM(parts, 6), *options = options_of(PyTuple_GET_ITEM(parts, 5), given);
  if (options == NULL) return NULL;
  Py_ssize_t number = PyTuple_GET_SIZE(positions);
  for (Py_ssize_t i = 0; i < number; i++) tensors[i] = given[PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, i))];
  PyObject *plan = entry_of(parts, options, tensors, number);
  Py_DECREF(options);
  if (plan == NULL) return NULL;
  PyObject *result = NULL;
  if (plan == Py_None || plan == Py_False) {
    result = PyObject_Vectorcall(miss, given, count, NULL);
  } else {
    PyObject *apply = PyTuple_GET_ITEM(parts, 8);
    int wanted = wants_gradient(PyTuple_GET_ITEM(parts, 7), given, count);
    if (wanted == 0) result = PyObject_Vectorcall(plan, given, count, NULL);
    if (wanted > 0 && apply == Py_None) result = PyObject_Vectorcall(miss, given, count, NULL);
    if (wanted > 0 && apply != Py_None) result = call_node(apply, given, count, plan);
  }
  Py_DECREF(plan);
  return result;
}

static PyMethodDef call_method = {
    "call", (PyCFunction)(void (*)(void))call, METH_FASTCALL | METH_KEYWORDS, NULL};

/* Whether a tuple has positions of `count` arguments only. */
static int are_positions(PyObject *positions, Py_ssize_t count) {
  if (!PyTuple_CheckExact(positions)) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(positions); i++) {
    PyObject *position = PyTuple_GET_ITEM(positions, i);
    if (!PyLong_CheckExact(position)) return 0;
    Py_ssize_t value = PyLong_AsSsize_t(position);
    if (value < 0 || value >= count) return 0;
  }
  return 1;
}

static PyObject *caller(PyObject *self, PyObject *parts) {
  if (checked_parts(parts, 10) == NULL) return NULL;
  PyObject *autograd = PyTuple_GET_ITEM(parts, 7);
  Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(parts, 4));
  if (count == -1 && PyErr_Occurred()) return NULL;
  PyObject *options = PyTuple_GET_ITEM(parts, 5), *tensors = PyTuple_GET_ITEM(parts, 6);
  if (count < 0 || count > MOST_ARGUMENTS || !are_positions(options, count) || !are_positions(tensors, count) ||
      PyTuple_GET_SIZE(tensors) == 0 || !PyTuple_CheckExact(autograd) ||
      PyTuple_GET_SIZE(autograd) != 3) {
    PyErr_SetString(PyExc_TypeError, "expected a number of arguments, positions below it and autograd's functions");
    return NULL;
  }
  return PyCFunction_New(&call_method, parts);
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

/* How a kernel takes a tensor: contiguous [..., D] as [rows, D]; then with its two dimensions exchanged. */
enum { ROWS = 1, TRANSPOSED = 2 };

/* `t` in a layout; `sizes` are four words that live as long as `t`.  0, or -1 with an exception. */
static int lay_out(DLTensor *t, int layout, int64_t *sizes) {
  if (layout & ROWS) {
    int64_t width = t->ndim ? t->shape[t->ndim - 1] : 1, rows = 1;
    for (int i = 0; i + 1 < t->ndim; i++) rows *= t->shape[i];
    sizes[0] = rows, sizes[1] = width, sizes[2] = width ? width : 1, sizes[3] = 1;
    t->ndim = 2, t->shape = sizes, t->strides = sizes + 2;
  }
  if (layout & TRANSPOSED) {
    if (t->ndim != 2) {
      PyErr_SetString(PyExc_TypeError, "only a matrix can be transposed");
      return -1;
    }
    int64_t rows = t->shape[0], columns = t->shape[1], row = t->strides[0], column = t->strides[1];
    sizes[0] = columns, sizes[1] = rows, sizes[2] = column, sizes[3] = row;
    t->shape = sizes, t->strides = sizes + 2;
  }
  return 0;
}

/* What a kernel is called with. */
typedef struct {
  TVMFFIAny values[MOST_ARGUMENTS];
  DLTensor tensors[MOST_ARGUMENTS];
  int64_t sizes[MOST_ARGUMENTS][4];
  const DLTensor *first; /* on a GPU; or NULL */
} Packed;

/* Writes argument i; 0, or -1 with an exception. */
static int pack(Packed *packed, int i, PyObject *value, int layout) {
  TVMFFIAny *into = &packed->values[i];
  DLTensor *tensor = &packed->tensors[i];
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
    if (layout && lay_out(tensor, layout, packed->sizes[i])) return -1;
    if (packed->first == NULL && tensor->device.device_type != kDLCPU) packed->first = tensor;
  } else {
    PyErr_Format(PyExc_TypeError, "a kernel takes no %.100s", Py_TYPE(value)->tp_name);
    return -1;
  }
  return 0;
}

/* Calls a kernel's function on the current stream of its first tensor's device; 0, or -1 with an exception. */
static int call_kernel(void *handle, Packed *packed, int count) {
  TVMFFIAny result;
  void *stream = NULL, *before = NULL;
  DLDevice device = {kDLCPU, 0};
  if (packed->first != NULL) {
    device = packed->first->device;
    if (torch_table->current_work_stream(device.device_type, device.device_id, &stream)) return -1;
    if (TVMFFIEnvSetStream(device.device_type, device.device_id, stream, &before)) {
      raise_failure();
      return -1;
    }
  }
  int failed;
  memset(&result, 0, sizeof result);
  Py_BEGIN_ALLOW_THREADS; /* a launch waits while the queue is full */
  failed = TVMFFIFunctionCall(handle, packed->values, count, &result);
  Py_END_ALLOW_THREADS;
  if (failed) raise_failure();
  if (packed->first != NULL && before != stream &&
      TVMFFIEnvSetStream(device.device_type, device.device_id, before, NULL) && !failed) {
    raise_failure();
    failed = 1;
  }
  return failed ? -1 : 0;
}

/* The address of a tvm_ffi.Function, as a Python number. */
static PyObject *handle_of(PyObject *kernel) { return PyObject_CallMethodNoArgs(kernel, name.chandle); }

/* kernel: a tvm_ffi.Function; rows: bit i is set where argument i is taken as [rows, D]. */
static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
  Packed packed;
  packed.first = NULL;
  if (count < 2 || count - 2 > MOST_ARGUMENTS) {
    PyErr_Format(PyExc_TypeError, "launch takes a function, rows and at most %d arguments", MOST_ARGUMENTS);
    return NULL;
  }
  PyObject *address = handle_of(given[0]);
  if (address == NULL) return NULL;
  void *handle = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  unsigned long rows = PyLong_AsUnsignedLong(given[1]);
  if (PyErr_Occurred()) return NULL;
  for (int i = 0; i < count - 2; i++)
    if (pack(&packed, i, given[i + 2], rows >> i & 1 ? ROWS : 0)) return NULL;
  if (call_kernel(handle, &packed, (int)(count - 2))) return NULL;
  Py_RETURN_NONE;
}

/* ---- program ---- */

/* Launches (address, kernel, operands): operands are numbers and None, or (source, layout): argument `source`, or
   output -1 - source.  0, or -1 with an exception. */
static int run_launch(PyObject *step, PyObject *const *given, PyObject *const *outputs) {
  Packed packed;
  packed.first = NULL;
  PyObject *operands = PyTuple_GET_ITEM(step, 2);
  Py_ssize_t count = PyTuple_GET_SIZE(operands);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *value = PyTuple_GET_ITEM(operands, i);
    long layout = 0;
    if (PyTuple_CheckExact(value)) {
      long source = PyLong_AsLong(PyTuple_GET_ITEM(value, 0));
      layout = PyLong_AsLong(PyTuple_GET_ITEM(value, 1));
      value = source >= 0 ? given[source] : outputs[-1 - source];
    }
    if (pack(&packed, (int)i, value, (int)layout)) return -1;
  }
  return call_kernel(PyLong_AsVoidPtr(PyTuple_GET_ITEM(step, 0)), &packed, (int)count);
}

/* The output at this position, or a tuple of those at these; None for None.  NULL with an exception. */
static PyObject *results_of(PyObject *results, PyObject *const *outputs) {
  if (results == Py_None) return Py_NewRef(results);
  if (!PyTuple_CheckExact(results)) return Py_NewRef(outputs[PyLong_AsSsize_t(results)]);
  PyObject *tuple = PyTuple_New(PyTuple_GET_SIZE(results));
  for (Py_ssize_t i = 0; tuple != NULL && i < PyTuple_GET_SIZE(results); i++)
    PyTuple_SET_ITEM(tuple, i, results_of(PyTuple_GET_ITEM(results, i), outputs));
  return tuple;
}

/* parts: (count, allocators, launches, results), as `program` takes them. */
static PyObject *run_program(PyObject *parts, PyObject *const *given, Py_ssize_t count) {
  PyObject *outputs[MOST_ARGUMENTS], *allocators = PyTuple_GET_ITEM(parts, 1), *launches = PyTuple_GET_ITEM(parts, 2);
  if (count < PyLong_AsSsize_t(PyTuple_GET_ITEM(parts, 0))) {
    PyErr_SetString(PyExc_TypeError, "a program has fewer arguments than its launches take");
    return NULL;
  }
  Py_ssize_t made = 0;
  for (; made < PyTuple_GET_SIZE(allocators); made++)
    if ((outputs[made] = PyObject_CallNoArgs(PyTuple_GET_ITEM(allocators, made))) == NULL) break;
  int failed = made < PyTuple_GET_SIZE(allocators);
  for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(launches); i++)
    failed = run_launch(PyTuple_GET_ITEM(launches, i), given, outputs) != 0;
  PyObject *result = failed ? NULL : results_of(PyTuple_GET_ITEM(parts, 3), outputs);
  while (made > 0) Py_DECREF(outputs[--made]);
  return result;
}

static PyMethodDef program_method = {"run", (PyCFunction)(void (*)(void))run_program, METH_FASTCALL, NULL};

/* Whether an operand is a number, None or (source, layout) with a source that there is. */
static int is_operand(PyObject *operand, Py_ssize_t arguments, Py_ssize_t outputs) {
  if (operand == Py_None || PyFloat_CheckExact(operand) || PyLong_CheckExact(operand)) return 1;
  if (!PyTuple_CheckExact(operand) || PyTuple_GET_SIZE(operand) != 2) return 0;
  if (!PyLong_CheckExact(PyTuple_GET_ITEM(operand, 0)) || !PyLong_CheckExact(PyTuple_GET_ITEM(operand, 1))) return 0;
  Py_ssize_t source = PyLong_AsSsize_t(PyTuple_GET_ITEM(operand, 0));
  Py_ssize_t layout = PyLong_AsSsize_t(PyTuple_GET_ITEM(operand, 1));
  return source < arguments && -1 - source < outputs && layout >= 0 && layout <= (ROWS | TRANSPOSED);
}

/* Whether a launch is (kernel, operands), each as in `is_operand`. */
static int is_launch(PyObject *step, Py_ssize_t arguments, Py_ssize_t outputs) {
  if (!PyTuple_CheckExact(step) || PyTuple_GET_SIZE(step) != 2) return 0;
  PyObject *operands = PyTuple_GET_ITEM(step, 1);
  if (!PyTuple_CheckExact(operands) || PyTuple_GET_SIZE(operands) > MOST_ARGUMENTS) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); i++)
    if (!is_operand(PyTuple_GET_ITEM(operands, i), arguments, outputs)) return 0;
  return 1;
}

/* Whether results are the position of one output, or a tuple of positions and None. */
static int are_results(PyObject *results, Py_ssize_t outputs) {
  int right = 1, is_tuple = PyTuple_CheckExact(results);
  for (Py_ssize_t i = 0; right && i < (is_tuple ? PyTuple_GET_SIZE(results) : 1); i++) {
    PyObject *position = is_tuple ? PyTuple_GET_ITEM(results, i) : results;
    if (is_tuple && position == Py_None) continue;
    Py_ssize_t value = PyLong_CheckExact(position) ? PyLong_AsSsize_t(position) : -1;
    right = value >= 0 && value < outputs;
  }
  return right;
}

/* Launches as `run_launch` takes them: with each kernel's address; NULL with an exception. */
static PyObject *addressed(PyObject *launches) {
  PyObject *steps = PyTuple_New(PyTuple_GET_SIZE(launches));
  for (Py_ssize_t i = 0; steps != NULL && i < PyTuple_GET_SIZE(launches); i++) {
    PyObject *step = PyTuple_GET_ITEM(launches, i), *kernel = PyTuple_GET_ITEM(step, 0);
    PyObject *address = handle_of(kernel);
    PyObject *whole = address ? PyTuple_Pack(3, address, kernel, PyTuple_GET_ITEM(step, 1)) : NULL;
    Py_XDECREF(address);
    if (whole == NULL) Py_CLEAR(steps);
    else PyTuple_SET_ITEM(steps, i, whole);
  }
  return steps;
}

/* count: the least number of arguments; allocators: of outputs; launches: (kernel, operands) each; results: the
   position of one output, or a tuple of positions. */
static PyObject *program(PyObject *self, PyObject *given) {
  PyObject *allocators, *launches, *results;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(given, "nO!O!O", &count, &PyTuple_Type, &allocators, &PyTuple_Type, &launches, &results))
    return NULL;
  Py_ssize_t outputs = PyTuple_GET_SIZE(allocators);
  int right = count >= 0 && outputs <= MOST_ARGUMENTS && are_results(results, outputs);
  for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(launches); i++)
    right = is_launch(PyTuple_GET_ITEM(launches, i), count, outputs);
  if (!right) {
    PyErr_Clear();
    PyErr_SetString(PyExc_TypeError, "expected launches of arguments, outputs, numbers and None, and results that are outputs");
    return NULL;
  }
  PyObject *steps = addressed(launches), *run = NULL;
  PyObject *parts = steps ? Py_BuildValue("(nOOO)", count, allocators, steps, results) : NULL;
  if (parts != NULL) run = PyCFunction_New(&program_method, parts);
  Py_XDECREF(steps);
  Py_XDECREF(parts);
  return run;
}

/* ---- the module ---- */

static PyMethodDef methods[] = {
    {"describe", (PyCFunction)(void (*)(void))describe, METH_FASTCALL, NULL},
    {"finder", finder, METH_VARARGS, NULL},
    {"caller", caller, METH_VARARGS, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {"program", program, METH_VARARGS, NULL},
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
      {&name.get, "get"},
      {&name.on_gpu, "on_gpu"},
      {&name.mapping, "_module_state_mapping"},
      {&name.data, "data"},
  };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if ((*names[i].into = PyUnicode_InternFromString(names[i].text)) == NULL) return -1;
  return 0;
}

PyMODINIT_FUNC PyInit_calls(void) {
  return bind_names() || bind_torch() ? NULL : PyModule_Create(&module);
}
